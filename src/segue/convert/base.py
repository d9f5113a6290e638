"""The model that a conversion begins with: a Hugging Face id, a folder, or a GGUF file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from segue.convert import pretrained
from segue.core.tensor_files import fingerprint
from segue.data.files import quiet_transformers
from segue.errors import ConfigError, SegueError
from segue.reporting.records import write_json

IMAGE_SETTINGS = "preprocessor_config.json"

Kind = Literal["causal", "masked", "labels", "encoder"]

ENDINGS: dict[str, Kind] = {
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForSequenceClassification": "labels",
    "ForImageClassification": "labels",
    "Model": "encoder",
}


@dataclass
class Base:
    """A pretrained model in float32, how it reads its input, and what it is for."""

    name: str
    model: nn.Module
    reader: Any  # a tokenizer, or the settings of images
    kind: Kind
    config: dict[str, Any]  # as it was loaded; surgery may shorten it
    dtype: torch.dtype  # that its weights are stored in
    hash: str

    def again(self) -> nn.Module:
        """Load the original once more: its modules may have been replaced since."""
        return open_base(self.name).model

    def save_reader(self, folder: Path) -> None:
        """Save the tokenizer, or the settings of images."""
        if self.reads_images:
            write_json(self.reader, folder / IMAGE_SETTINGS)
        else:
            self.reader.save_pretrained(folder)

    @property
    def revision(self) -> str | None:
        """The commit of the hub that it came from."""
        return getattr(self.model.config, "_commit_hash", None)

    @property
    def reads_images(self) -> bool:
        return bool(self.model.main_input_name == "pixel_values")

    @property
    def class_names(self) -> dict[str, int]:
        """The numbers of its classes by their names."""
        return dict(getattr(self.model.config, "label2id", None) or {})

    @property
    def positions(self) -> int | None:
        """The longest text it was made for."""
        longest = getattr(self.model.config, "max_position_embeddings", None)
        return longest if isinstance(longest, int) else None


def open_base(name: str) -> Base:
    """Load a pretrained model with its tokenizer or image processor; pickled weights are refused."""
    transformers = quiet_transformers(name)
    asked = f"the model {name!r} was to be converted."
    place, options = _place(name)
    try:
        if pretrained.is_converted(place):
            model = pretrained.from_pretrained(place, dtype=torch.float32)
            config = pretrained.read_record(Path(place))["base"]["config"]
            stored = getattr(torch, config.get("dtype") or "float32")
        else:
            settings = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False, **options)
            stored = settings.dtype if isinstance(settings.dtype, torch.dtype) else torch.float32
            model = _loaded(pretrained.model_class(settings), place, options, asked)
            config = _plain(model.config, type(model).__name__, stored)
        reader = _reader(transformers, model, place, options)
    except SegueError:
        raise
    except Exception as error:  # transformers lets the errors of all its readers through
        reason = (str(error).strip().splitlines() or [""])[0]
        hint = "give a folder with config.json, safetensors and a tokenizer, a GGUF file, or an id."
        raise ConfigError(asked, f"{type(error).__name__}: {reason}", hint) from error
    return Base(name, model, reader, _kind(model, asked), config, stored, fingerprint(model.state_dict()))


def _loaded(kind: Any, place: str, options: dict[str, Any], asked: str) -> Any:
    """Load every weight, from safetensors or GGUF."""
    safe = {} if options else {"use_safetensors": True}
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # else only the first of several processes would get the weights
    model, found = kind.from_pretrained(place, dtype=torch.float32, output_loading_info=True, **safe, **options)
    if missing := sorted(found["missing_keys"]):
        hint = "give a complete model; a head that is to be trained first is trained without Segue."
        raise ConfigError(asked, f"Its files lack {len(missing)} weights ({missing[0]} first).", hint)
    return model.eval()


def _place(name: str) -> tuple[str, dict[str, Any]]:
    path = Path(name)
    if path.suffix == ".gguf" and path.is_file():
        return str(path.parent), {"gguf_file": path.name}
    return name, {}


def _kind(model: nn.Module, asked: str) -> Kind:
    name = type(model).__name__
    for ending, kind in ENDINGS.items():
        if name.endswith(ending):
            return kind
    raise ConfigError(asked, f"It is a {name}.", f"models whose names end in {', '.join(ENDINGS)} can be converted.")


def _reader(transformers: Any, model: nn.Module, place: str, options: dict[str, Any]) -> Any:
    if model.main_input_name != "pixel_values":
        return transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)
    path = transformers.utils.cached_file(place, IMAGE_SETTINGS)
    return json.loads(Path(path).read_text(encoding="utf-8"))


def _plain(config: Any, architecture: str, stored: torch.dtype) -> dict[str, Any]:
    """Return a configuration as JSON can hold it, with what is needed to build the model again."""
    plain: dict[str, Any] = config.to_dict()
    plain.pop("quantization_config", None)  # of a GGUF file, whose weights are whole again
    return plain | {"architectures": [architecture], "dtype": str(stored).removeprefix("torch.")}
