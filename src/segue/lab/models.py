"""Models: small ones defined here, pretrained ones of timm and Hugging Face, and outlines of any by name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from segue.border import PositiveInt, checked
from segue.convert.configuration import build_config
from segue.convert.pretrained import outline
from segue.core import tensor_files
from segue.data.dataset import Dataset
from segue.data.files import existing_file, located, optional, quiet_transformers
from segue.errors import ConfigError, SegueError, nearest
from segue.lab.small_vit import VisionTransformer

LIBRARIES = ("timm", "hf", "torchvision")


@checked
@dataclass(frozen=True, kw_only=True)
class SmallViT:
    """A small vision transformer; the data decides the size of its images."""

    patch: PositiveInt = 2
    width: PositiveInt = 48
    depth: PositiveInt = 6
    heads: PositiveInt = 4
    convolutional: bool = False  # the patches come from 3 x 3 convolutions of stride 2; then a patch is a power of 2
    weights: str | None = None  # a safetensors file, also in half precision; None: random weights

    sites = "blocks.*.attn"
    head = "head.*"

    def __call__(self, data: Dataset, size: int | None, seed: int) -> nn.Module:
        channels, pixels, _ = data.train.inputs.shape[1:]
        pixels = size or pixels
        if self.convolutional and (self.patch < 2 or self.patch.bit_count() > 1):
            raise ConfigError(
                f"patch must be 2, 4, 8 or another power of 2 with convolutional=True, got {self.patch}.",
                "Each convolution of the stem halves the image.",
                "choose another patch size, or convolutional=False.",
            )
        if pixels % self.patch:
            raise ConfigError(
                f"patch must divide the image size, got {self.patch}.",
                f"The images have {pixels} x {pixels} pixels.",
                "choose another patch size, or resize the images.",
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = VisionTransformer(
                pixels=pixels,
                channels=channels,
                patch=self.patch,
                width=self.width,
                depth=self.depth,
                heads=self.heads,
                classes=data.classes,
                convolutional=self.convolutional,
            )
        if self.weights is not None:
            problem = f"the weights {self.weights!r} cannot be loaded."
            with _of_a_library(problem, "check that the file is of this very model, complete and undamaged."):
                model.load_state_dict(tensor_files.read(existing_file(problem, self.weights)))  # cast to float32
        return model


@checked
@dataclass(frozen=True, kw_only=True)
class Timm:
    """A model of timm, by default pretrained (downloaded from its hub on the first use)."""

    name: str
    pretrained: bool = True

    sites = "blocks.*.attn"
    head = "head.*"

    def __call__(self, data: Dataset, size: int | None, seed: int) -> nn.Module:
        timm = optional("timm", "timm", f"the timm model {self.name!r} cannot be built.")
        channels, pixels, _ = data.train.inputs.shape[1:]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with _of_a_library(f"the timm model {self.name!r} cannot be built."):
                model: nn.Module = timm.create_model(
                    self.name, pretrained=self.pretrained, num_classes=data.classes, in_chans=channels, img_size=size or pixels
                )
        return model


@checked
@dataclass(frozen=True, kw_only=True)
class SentenceClassifier:
    """A Hugging Face encoder, from a folder or by its id, with a fresh classification head."""

    name: str

    sites = ("**.attention.self", "**.attention.output.dense")  # queries, keys and values; and what mixes the heads
    head = "classifier.*"

    def __call__(self, classes: int, seed: int) -> nn.Module:
        transformers = quiet_transformers(self.name)
        place = str(located(self.name))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with _of_a_library(f"the Hugging Face model {self.name!r} cannot be built."):
                loaded: nn.Module = transformers.AutoModelForSequenceClassification.from_pretrained(
                    place, config=_declared_config(transformers, place, num_labels=classes), use_safetensors=True
                )
        return loaded

    def tokenizer(self) -> Any:
        """Return the encoder's own tokenizer."""
        with _of_a_library(f"the tokenizer of {self.name!r} cannot be loaded."):
            transformers = quiet_transformers(self.name)
            return transformers.AutoTokenizer.from_pretrained(str(located(self.name)), trust_remote_code=False)


@contextmanager
def _of_a_library(fault: str, hint: str = "check its name and files; without them it must be downloaded.") -> Iterator[None]:
    """Turn what another library raises while it loads a model into an error of three lines."""
    try:
        yield
    except SegueError:
        raise
    except Exception as error:  # of the network, of files, of its own checks
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(fault, f"{type(error).__name__}: {reason}", hint) from error


def build(name: str, device: str = "meta") -> nn.Module:
    """Build a model with random weights by the name one types.

    That is what `segue convert` takes (a folder, a GGUF file or an id of the Hugging Face hub, also with hf: before it),
    timm:NAME, torchvision:NAME or demo. On the meta device its weights take no memory.
    """
    kind, colon, rest = name.partition(":")
    if not colon or kind not in LIBRARIES:
        kind, rest = "demo" if name == "demo" else _guess(name), name
    if kind == "hf":
        return _hugging_face(rest, device)
    makers = {"timm": _timm, "torchvision": _torchvision}
    make = makers[kind](rest) if kind in makers else VisionTransformer
    place: Any = torch.device(device)  # a context manager, though torch's types do not say so
    with place, torch.random.fork_rng(devices=[]):
        model: nn.Module = make()
    return model


def example(model: nn.Module, batch: int, tokens: int) -> Any:
    """Return a batch of zeros that a model of these libraries can be called with."""
    settings = getattr(model, "pretrained_cfg", None)
    config: Any = getattr(model, "config", None)
    place: Any = next(model.parameters()).device
    with place:
        if isinstance(model, VisionTransformer):
            return torch.zeros(batch, 1, 8, 8)
        if isinstance(settings, dict) and "input_size" in settings:  # timm
            return torch.zeros(batch, *settings["input_size"])
        if (main := getattr(model, "main_input_name", None)) is None:  # torchvision
            return torch.zeros(batch, 3, 224, 224)
        if main != "pixel_values":
            return {main: torch.zeros(batch, tokens, dtype=torch.long)}
        size = config.image_size
        return {main: torch.zeros(batch, config.num_channels, *((size, size) if isinstance(size, int) else size))}


def _guess(name: str) -> str:
    """Say which library a name without one is of: a file, a folder or an id is what `segue convert` takes."""
    if Path(name).exists() or (name.count("/") == 1 and ":" not in name):
        return "hf"
    if "/" in name or ":" in name:
        raise ConfigError(
            f"there is no model {name!r}.",
            "It is not a folder, and it names no library.",
            "write timm:NAME, hf:FOLDER_OR_ID or torchvision:NAME.",
        )
    timm = optional("timm", "timm", f"the model {name!r} cannot be built.")
    known = timm.list_models()
    return "timm" if name in known or nearest(name, known).startswith("Nearest") else "hf"


def _timm(name: str) -> Callable[[], nn.Module]:
    timm = optional("timm", "timm", f"the model {name!r} cannot be built.")
    if not timm.is_model(name):
        raise ConfigError(f"timm has no model {name!r}.", nearest(name, timm.list_models()), "timm.list_models() lists them.")
    return partial(timm.create_model, name, pretrained=False)


def _torchvision(name: str) -> Callable[[], nn.Module]:
    models = optional("torchvision.models", "timm", f"the model {name!r} cannot be built.")
    names = models.list_models()
    if name not in names:
        hint = "torchvision.models.list_models() lists them."
        raise ConfigError(f"torchvision has no model {name!r}.", nearest(name, names), hint)
    return partial(models.get_model, name, weights=None)


def _declared_config(transformers: Any, name: str, **settings: Any) -> Any:
    """Read the configuration of a model, without what would choose code."""
    return build_config(transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **settings).to_dict())


def _hugging_face(name: str, device: str) -> nn.Module:
    optional("transformers", "hf", f"the model {name!r} cannot be built.")
    return outline(name, device)


@dataclass(frozen=True)
class Kind:
    """Modules whose names differ only in numbers."""

    pattern: str
    count: int
    module: str
    parameters: int


def kinds(model: nn.Module) -> list[Kind]:
    """Group the modules that repeat, in the order of the model.

    >>> [kind.pattern for kind in kinds(build("demo"))][:2]
    ['blocks.*', 'blocks.*.norm1']
    """
    groups: dict[tuple[str, str], list[nn.Module]] = defaultdict(list)
    for name, module in model.named_modules():
        if re.search(r"\.\d+(\.|$)", name) and any(True for _ in module.parameters()):
            groups[re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), type(module).__name__].append(module)
    return [
        Kind(pattern, len(modules), kind, sum(p.numel() for module in modules for p in module.parameters()))
        for (pattern, kind), modules in groups.items()
    ]
