"""The digits of scikit-learn."""

from __future__ import annotations

import torch

from segue.data import (
    Digits,
)
from tests.data.source_files import (
    assert_holds,
)


def test_digits_keep_their_split():
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images = (torch.from_numpy(pixels)[order].view(-1, 1, 8, 8) * 255 / 16).floor().byte()
    labels = torch.from_numpy(labels)[order]
    assert_holds(Digits()(), (images[500:], labels[500:]), (images[:500], labels[:500]), 10)
    assert (int(images.min()), int(images.max())) == (0, 255)


def test_another_layout_of_scikit_learn_is_read_by_its_own_function(monkeypatch):
    usual = Digits()()
    monkeypatch.setattr("segue.data.digits._FILE", "moved")
    assert_holds(Digits()(), (usual.train.inputs, usual.train.labels), (usual.test.inputs, usual.test.labels), 10)
