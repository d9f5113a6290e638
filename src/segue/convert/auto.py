"""Converted folders behind transformers' Auto classes: a model type of their own, which transformers alone does not know.

`import segue.convert` registers it as soon as transformers' Auto classes are imported, and imports nothing itself: the command
reads its options here, without waiting for torch.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

MODEL_TYPE = "segue"
KINDS = {  # the Auto class for each ending of a model class that can be converted
    "AutoModel": ("",),
    "AutoModelForCausalLM": ("ForCausalLM", "LMHeadModel"),
    "AutoModelForMaskedLM": ("ForMaskedLM",),
    "AutoModelForSequenceClassification": ("ForSequenceClassification",),
    "AutoModelForImageClassification": ("ForImageClassification",),
}
OF_THE_HUB = ("revision", "cache_dir", "token", "local_files_only", "force_download")
UNUSED = ("config", "trust_remote_code", "adapter_kwargs", "subfolder", "proxies", "_from_auto", "_commit_hash")


def config_class() -> Any:
    """Return the class of a converted folder's config.json; the original's configuration is inside it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[MODEL_TYPE]


def register_config(auto: ModuleType) -> None:
    """Make AutoConfig read the config.json of converted folders."""
    from transformers import PreTrainedConfig

    class SegueConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
        """The configuration of a converted model: `base_config` is that of the original, as plain data."""

        model_type = MODEL_TYPE

        def __init__(self, base_config: dict[str, Any] | None = None, **settings: Any) -> None:
            super().__init__(**settings)
            self.base_config = base_config or {}

    auto.AutoConfig.register(MODEL_TYPE, SegueConfig)


def register_models(auto: ModuleType) -> None:
    """Make the Auto classes load converted folders."""
    for name, endings in KINDS.items():
        loader = type(f"{name}OfSegue", (Loader,), {"auto": name, "endings": endings, "config_class": config_class()})
        getattr(auto, name).register(config_class(), loader)


class Loader:
    """What an Auto class calls: it loads by `segue.from_pretrained`, and returns a plain model of transformers."""

    auto = ""
    endings: tuple[str, ...] = ()

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], **settings: Any) -> Any:
        """Load a folder, or an id of the hub."""
        from segue.convert.pretrained import from_pretrained
        from segue.errors import ConfigError

        of_hub = {key: settings.pop(key) for key in OF_THE_HUB if settings.get(key) is not None}
        dtype = settings.pop("dtype", None) or settings.pop("torch_dtype", None)
        if other := [key for key, value in settings.items() if key not in UNUSED and value is not None]:
            raise ConfigError(
                f"{cls.auto}.from_pretrained({other[0]}=...) is not possible for a converted model.",
                "It is loaded by segue.from_pretrained, which takes dtype alone.",
                f"leave {other[0]} out, and move or change the model afterwards.",
            )
        model = from_pretrained(_folder(name, of_hub), dtype=_dtype(dtype))
        kind = type(model).__name__
        if not kind.endswith(cls.endings):
            raise ConfigError(f"{cls.auto} cannot load {name}.", f"It is a {kind}.", "load it by segue.from_pretrained.")
        return model.base_model if cls.auto == "AutoModel" else model


def _folder(name: str | os.PathLike[str], of_hub: dict[str, Any]) -> Path:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(name), **of_hub))


def _dtype(asked: Any) -> Any:
    import torch

    return None if asked == "auto" else getattr(torch, asked) if isinstance(asked, str) else asked


class WhenImported(MetaPathFinder):
    """Do something with a module right after its first import."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then, self.asked = name, then, False

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Let the others find the module, and see to it that the rest follows."""
        if name != self.name or self.asked:
            return None
        self.asked = True
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(self._execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        self.then(module)


def register() -> None:
    """Register with transformers' Auto classes, now or when they are imported."""
    package = "transformers.models.auto"
    for name, then in ((f"{package}.configuration_auto", register_config), (f"{package}.modeling_auto", register_models)):
        if name in sys.modules:
            then(sys.modules[name])
        else:
            sys.meta_path.insert(0, WhenImported(name, then))
