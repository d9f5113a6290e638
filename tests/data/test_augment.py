"""Augmentation and normalisation."""

from __future__ import annotations

import pytest
import torch

from segue.data import (
    Crop,
    CropFlip,
    NoAugmentation,
    normalise,
)
from tests.data.source_files import (
    fails,
    part,
)


def naive(images: torch.Tensor, pad: int, flip: bool, generator: torch.Generator) -> torch.Tensor:
    """Crop and mirror one image after the other."""
    corners = torch.randint(2 * pad + 1, (2, len(images)), generator=generator)
    coins = torch.randint(2, (len(images), 1), generator=generator) if flip else torch.zeros(len(images), 1)
    height, width = images.shape[2:]
    changed = []
    for image, top, left, coin in zip(images, *corners.tolist(), coins.flatten().tolist(), strict=True):
        padded = image.new_zeros(image.shape[0], height + 2 * pad, width + 2 * pad)
        padded[:, pad : pad + height, pad : pad + width] = image
        window = padded[:, top : top + height, left : left + width]
        changed.append(window.flip(2) if coin else window)
    return torch.stack(changed)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (7, 3, 32, 32), (5, 1, 28, 28), (64, 3, 5, 9)])
@pytest.mark.parametrize("pad", [0, 1, 4, 40])
@pytest.mark.parametrize("flip", [False, True])
def test_crops_equal_the_naive_ones(shape: tuple[int, ...], pad: int, flip: bool):
    images = torch.randn(shape)
    expected = naive(images, pad, flip, torch.Generator().manual_seed(3))
    assert torch.equal(CropFlip(pad=pad, flip=flip)(images, torch.Generator().manual_seed(3)), expected)
    if not flip:
        assert torch.equal(Crop(pad)(images, torch.Generator().manual_seed(3)), expected)


def test_augmentation_is_reproducible_and_complete():
    image = torch.arange(9.0).view(1, 1, 3, 3) + 1
    many = CropFlip(pad=1)(image.expand(2000, -1, -1, -1), torch.Generator().manual_seed(0))
    kinds, counts = many.flatten(1).unique(dim=0, return_counts=True)
    assert len(kinds) == 2 * 9  # every shift, mirrored or not, and about equally often
    assert int(counts.min()) > 60
    assert int(counts.max()) < 170
    again = CropFlip(pad=1)(image.expand(2000, -1, -1, -1), torch.Generator().manual_seed(0))
    other = CropFlip(pad=1)(image.expand(2000, -1, -1, -1), torch.Generator().manual_seed(1))
    assert torch.equal(many, again)
    assert not torch.equal(many, other)


def test_augmentation_leaves_global_randomness_and_its_input_alone():
    images, before = torch.ones(4, 3, 8, 8), torch.get_rng_state()
    generator = torch.Generator().manual_seed(0)
    CropFlip()(images, generator)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(images, torch.ones(4, 3, 8, 8))
    state = generator.get_state()
    assert NoAugmentation()(images, generator) is images
    assert torch.equal(state, generator.get_state())


def test_augmentations_are_configurations():
    assert repr(CropFlip()) == "CropFlip(pad=4, flip=True)"
    assert Crop(2) == Crop(pad=2)
    assert hash(NoAugmentation()) == hash(NoAugmentation())
    fails(lambda: Crop(-1), "Crop(pad=...) must be an integer of at least 0, got -1.")
    fails(lambda: CropFlip()(torch.zeros(3, 8, 8), torch.Generator()), "The input has the shape (3, 8, 8).", "(B, C, H, W)")


@pytest.mark.parametrize("size", [None, 32, 16, 48, 224])
def test_normalise_agrees_with_torchvision(size: int | None):
    from torchvision.transforms import functional

    images, mean, std = part(4)[0], (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    expected = images.float() / 255
    if size:
        expected = functional.resize(expected, [size, size], antialias=True)
    actual = normalise(images, mean, std, size)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, functional.normalize(expected, mean, std), atol=1e-5, rtol=1e-5)


def test_normalise_refuses_what_does_not_fit():
    images = part(2)[0]
    fails(lambda: normalise(images.float(), (0.5,) * 3, (0.5,) * 3), "The images are torch.float32", "Give uint8")
    fails(lambda: normalise(images[0], (0.5,) * 3, (0.5,) * 3), "of shape (3, 32, 32)")
    fails(lambda: normalise(images, (0.5,), (0.5,)), "The images have 3 channels.", "for each channel")
    fails(lambda: normalise(images, (0.5,) * 3, (0.5, 0.0, 0.5)), "one std above 0")
