"""Tasks of a conversion: the scores are those that transformers' own losses give."""

from __future__ import annotations

import math

import pytest
import torch

from segue.convert import data
from segue.convert.pretrained import open_base
from tests.convert.small_models import epoch, scores, settings


def test_the_perplexity_of_a_causal_model_is_that_of_transformers(base, texts):
    opened = open_base(str(base("llama")))
    found = data.load(opened, settings(texts))
    losses, tokens = 0.0, 0
    with torch.no_grad():
        for batch in found.held_out:
            ids = batch["input_ids"]
            losses += opened.model(input_ids=ids, labels=ids).loss.item() * ids.numel()
            tokens += ids.numel()
    assert tokens == 16 * round(0.1 * (found.train.count + tokens // 16))
    assert found.task.of(scores(opened, found)) == pytest.approx(math.exp(losses / tokens), rel=1e-6)


def test_the_perplexity_of_a_masked_model_is_that_of_transformers(base, texts):
    """Over all hidden tokens, each of which counts once."""
    opened = open_base(str(base("masked")))
    found = data.load(opened, settings(texts, batch=5))
    losses, tokens = 0.0, 0
    with torch.no_grad():
        for batch in found.held_out:
            hidden = int((batch["labels"] != -100).sum())
            assert hidden == int((batch["input_ids"] == 3).sum()) > 0
            losses += opened.model(**batch).loss.item() * hidden
            tokens += hidden
    assert found.task.of(scores(opened, found)) == pytest.approx(math.exp(losses / tokens), rel=1e-6)
    assert [batch["labels"].tolist() for batch in found.held_out] == [batch["labels"].tolist() for batch in found.held_out]
    assert not torch.equal(epoch(found, 0)[0]["labels"], epoch(found, 1)[0]["labels"])


def test_an_encoder_is_evaluated_by_the_cosine_to_its_own_embeddings(base, sources):
    opened = open_base(str(base("encoder")))
    found = data.load(opened, settings(sources["encoder"]))
    assert found.task.of(scores(opened, found)) == pytest.approx(1.0)
    other = open_base(str(base("encoder")))
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()).reshape(parameter.shape))
        cosines = []
        for batch in found.held_out:
            mask = batch["attention_mask"][..., None]
            inputs = {name: x for name, x in batch.items() if name != "targets"}
            means = [(m(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1) for m in (opened.model, other.model)]
            cosines += torch.nn.functional.cosine_similarity(*means).tolist()
    assert found.task.of(scores(other, found)) == pytest.approx(sum(cosines) / len(cosines), abs=1e-6)
    assert abs(sum(cosines) / len(cosines)) < 0.99
