"""Models by what one types: timm:NAME, hf:FOLDER_OR_ID, torchvision:NAME, demo. No trained weights are loaded."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from segue.errors import ConfigError, MissingExtraError, nearest
from segue.lab.small_vit import VisionTransformer

KINDS = ("timm", "hf", "torchvision")


def build(name: str, device: str = "meta") -> nn.Module:
    """Build the model of a name, on the meta device without memory for its weights."""
    kind, colon, rest = name.partition(":")
    if not colon or kind not in KINDS:
        kind, rest = "demo" if name == "demo" else _guess(name), name
    makers = {"timm": _timm, "hf": _hugging_face, "torchvision": _torchvision}
    make = makers[kind](rest) if kind in makers else VisionTransformer
    place: Any = torch.device(device)  # which is a context, though torch's types do not say so
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
    if Path(name).is_dir():
        return "hf"
    if "/" in name or ":" in name:
        raise ConfigError(
            f"the model {name!r} was asked for.",
            "There is no such folder, and no library is named.",
            "write timm:NAME, hf:FOLDER_OR_ID or torchvision:NAME.",
        )
    return "timm"


def _timm(name: str) -> Callable[[], nn.Module]:
    timm = _imported("timm", name, "timm")
    if not timm.is_model(name):
        names = timm.list_models()
        raise ConfigError(f"the timm model {name!r} was asked for.", nearest(name, names), "timm.list_models() lists them.")
    return partial(timm.create_model, name, pretrained=False)


def _torchvision(name: str) -> Callable[[], nn.Module]:
    torchvision = _imported("torchvision.models", name, "timm")
    names = torchvision.list_models()
    if name not in names:
        raise ConfigError(f"the torchvision model {name!r} was asked for.", nearest(name, names), "these are its models.")
    return partial(torchvision.get_model, name, weights=None)


def _hugging_face(name: str) -> Callable[[], nn.Module]:
    transformers = _imported("transformers", name, "hf")
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"the Hugging Face model {name!r} was asked for.", reason, "give a folder with config.json, or an id of the hub."
        ) from None
    return partial(transformers.AutoModel.from_config, config)


def _imported(module: str, name: str, extra: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise MissingExtraError(
            f"the model {name!r} was asked for.", f"{package} is not installed.", f"pip install segue[{extra}]"
        ) from None


@dataclass(frozen=True)
class Kind:
    """Modules whose names differ only in numbers."""

    pattern: str
    count: int
    module: str
    parameters: int


def kinds(model: nn.Module) -> list[Kind]:
    """Group the modules that repeat, in the order in which they stand in the model.

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
