"""What every dataset must fulfil, whatever its source."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from segue import data as sources
from segue.data import (
    Digits,
    Examples,
    HubDataset,
    Idx,
    ImageFolder,
    Parquet,
    Torchvision,
    Tsv,
    normalise,
)
from segue.data.dataset import image_dataset
from tests.data.source_files import fails, part

SOURCES = [
    Digits(),
    Idx(folder=Path("somewhere")),
    Parquet(train=Path("a.parquet"), test="b.parquet", image="img", label="fine_label"),
    ImageFolder(folder=Path("somewhere")),
    Torchvision(name="CIFAR100", folder=Path("somewhere")),
    HubDataset(id="uoft-cs/cifar100", image="img", label="fine_label"),
    Tsv(train=Path("a.tsv"), test="b.tsv"),
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: type(source).__name__)
def test_a_source_is_its_configuration(source: Any):
    fields = dataclasses.asdict(source)
    assert json.loads(json.dumps(fields)) == fields  # paths are stored as strings
    assert eval(repr(source), vars(sources)) == source
    assert hash(source) == hash(dataclasses.replace(source))
    with pytest.raises(dataclasses.FrozenInstanceError):
        source.folder = "elsewhere"
    with pytest.raises(TypeError):
        type(source)("positional")


def test_a_blank_channel_does_not_divide_by_zero():
    images, labels = part(30)
    images[:, 1] = 0
    dataset = image_dataset("It cannot be loaded.", Examples(images, labels), Examples(images, labels))
    assert dataset.mean[1] == 0.0
    assert dataset.std[1] == 1.0
    assert normalise(dataset.train.inputs, dataset.mean, dataset.std).isfinite().all()


def test_examples_say_how_many_they_are():
    assert repr(Examples(*part(4))) == "Examples(4 of (3, 32, 32))"
    assert len(Examples(*part(4))) == 4


def test_every_source_of_the_folder_is_listed():
    found = {type(source).__name__ for source in SOURCES}
    others = {"Crop", "CropFlip", "Dataset", "Examples", "NoAugmentation", "TextDataset", "normalise"}
    assert set(sources.__all__) == found | others
    assert all(getattr(sources, name).__module__.startswith("segue.data.") for name in sources.__all__)


IMAGES, LABELS = part(30)


@pytest.mark.parametrize(
    ("train", "test", "text"),
    [
        ((IMAGES.float(), LABELS), (IMAGES, LABELS), "The training images are torch.float32 of shape (30, 3, 32, 32)."),
        ((IMAGES, LABELS), (IMAGES[:, :2], LABELS), "The test images are torch.uint8 of shape (30, 2, 32, 32)."),
        ((IMAGES[:0], LABELS[:0]), (IMAGES, LABELS), "The training part is empty."),
        ((IMAGES, LABELS), (IMAGES[..., :16], LABELS), "the shape (3, 32, 32), test images (3, 32, 16)."),
        ((IMAGES, LABELS), (IMAGES[:, :1], LABELS), "the shape (3, 32, 32), test images (1, 32, 32)."),
        ((IMAGES, LABELS / 2), (IMAGES, LABELS), "The training labels are torch.float32 of shape (30,)."),
        ((IMAGES, LABELS[:, None]), (IMAGES, LABELS), "The training labels are torch.int64 of shape (30, 1)."),
        ((IMAGES, LABELS), (IMAGES, LABELS[:19]), "The test part has 30 images but 19 labels."),
        ((IMAGES, LABELS - 1), (IMAGES, LABELS), "The training labels go down to -1."),
        ((IMAGES, LABELS + 1), (IMAGES, LABELS), "take 10 of the 11 values from 0 to 10; the smallest is 1."),
        ((IMAGES, LABELS % 9), (IMAGES, LABELS), "The test labels go up to 9, but there are 9 classes."),
        ((IMAGES, LABELS * 0), (IMAGES, LABELS), "There is only one class."),
        ((IMAGES * 0, LABELS), (IMAGES, LABELS), "All training pixels are equal."),
    ],
)
def test_what_a_dataset_must_fulfil(train: Any, test: Any, text: str):
    fails(lambda: image_dataset("It cannot be loaded.", Examples(*train), Examples(*test)), "It cannot be loaded.\n", text)
