"""Signals: retrieval that can only be solved by looking back, and images that are changed a little."""

import pytest
import torch

from segue.errors import DataError
from segue.planning import signals
from tests.helpers import models


def test_after_a_repeated_key_its_value_comes():
    model = models.build(models.gpt2)
    model.config.vocab_size = 200
    found = signals.recall(model, weight=0.5, batches=2, rows=3, pairs=4)
    assert found.weight == 0.5
    for batch, mask in zip(found.batches, found.masks, strict=True):
        ids = batch["input_ids"]
        assert ids.shape == mask.shape == (3, 16)
        for row, marks in zip(ids.tolist(), mask.tolist(), strict=True):
            told = dict(zip(row[0:8:2], row[1:8:2], strict=True))
            asked = [i for i, mark in enumerate(marks) if mark]
            assert asked == [8, 10, 12, 14]
            assert sorted(row[i] for i in asked) == sorted(told)
            assert all(row[i + 1] == told[row[i]] for i in asked)
    assert torch.equal(found.batches[0]["input_ids"], signals.recall(model, rows=3, pairs=4).batches[0]["input_ids"])


def test_recall_needs_a_vocabulary():
    with pytest.raises(DataError, match="a language model with a vocabulary"):
        signals.recall(models.build(models.mlp))


def test_images_are_changed_a_little_and_nothing_else_is():
    images = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = signals.augmented([{"pixel_values": images, "flags": torch.ones(6)}], weight=2.0)
    changed = found.batches[0]["pixel_values"]
    assert not torch.equal(changed, images)
    assert changed.shape == images.shape
    assert changed.std().item() == pytest.approx(images.std().item(), rel=0.1)
    assert torch.equal(found.batches[0]["flags"], torch.ones(6))
    with pytest.raises(DataError, match="needs images"):
        signals.augmented([{"input_ids": torch.ones(2, 3, dtype=torch.long)}])
