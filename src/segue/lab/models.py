"""Models by name: small ones made here, pretrained ones of timm and Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from segue.data.dataset import Dataset
from segue.data.files import quiet_transformers
from segue.errors import ConfigError, MissingExtraError
from segue.lab.small_vit import VisionTransformer


@dataclass(frozen=True, kw_only=True)
class SmallViT:
    """A small vision transformer with random weights; its own sizes come here, those of the images from the data."""

    patch: int = 2
    width: int = 48
    depth: int = 6
    heads: int = 4

    sites = "blocks.*.attn"
    head = "head.*"

    def __call__(self, data: Dataset, size: int | None, seed: int) -> nn.Module:
        channels, pixels, _ = data.train.inputs.shape[1:]
        pixels = size or pixels
        if pixels % self.patch:
            raise ConfigError(
                f"{self} was to read images of {pixels} pixels.",
                f"They do not divide into patches of {self.patch}.",
                "choose a patch size that divides the image size.",
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return VisionTransformer(
                pixels=pixels,
                channels=channels,
                patch=self.patch,
                width=self.width,
                depth=self.depth,
                heads=self.heads,
                classes=data.classes,
            )


@dataclass(frozen=True, kw_only=True)
class Timm:
    """A model of timm, by default pretrained (fetched from its hub on the first use)."""

    name: str
    pretrained: bool = True

    sites = "blocks.*.attn"
    head = "head.*"

    def __call__(self, data: Dataset, size: int | None, seed: int) -> nn.Module:
        try:
            import timm
        except ImportError:
            raise MissingExtraError(
                f"the timm model {self.name!r} was to be built.", "timm is not installed.", "pip install segue[timm]"
            ) from None
        channels, pixels, _ = data.train.inputs.shape[1:]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = timm.create_model(
                self.name, pretrained=self.pretrained, num_classes=data.classes, in_chans=channels, img_size=size or pixels
            )
        return model


@dataclass(frozen=True, kw_only=True)
class SentenceClassifier:
    """A Hugging Face encoder, from a folder or by its id, with a fresh classification head."""

    name: str

    sites = ("**.attention.self", "**.attention.output.dense")  # queries, keys and values; and what mixes the heads
    head = "classifier.*"

    def __call__(self, classes: int, seed: int) -> nn.Module:
        transformers = quiet_transformers(self.name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            loaded: nn.Module = transformers.AutoModelForSequenceClassification.from_pretrained(
                self.name, num_labels=classes, use_safetensors=True
            )
        return loaded

    def tokenizer(self) -> Any:
        """Return the encoder's own tokenizer."""
        return quiet_transformers(self.name).AutoTokenizer.from_pretrained(self.name)
