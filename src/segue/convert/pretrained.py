"""Pretrained models: the original that a conversion begins with, and the converted one; nothing in a folder is ever run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from segue.border import checked
from segue.checkpoint import state as checkpoint
from segue.convert import manifest
from segue.convert.configuration import build_config, dtype_of, model_class, plain_config
from segue.core import files, tensor_files
from segue.data.files import hub_offline, quiet_transformers
from segue.errors import CheckpointError, ConfigError, MissingExtraError, SegueError
from segue.reporting.records import write_json

RECORD = "segue.json"
FORMAT = 2
WITHOUT_MANIFEST = 1  # of version 0.1.0: the record has hashes of weights and configuration, nothing covers the record itself
IMAGE_SETTINGS = "preprocessor_config.json"
GENERATION = "generation_config.json"
FLAGS = ("use_cache", "do_sample", "return_dict_in_generate", "renormalize_logits", "remove_invalid_values")  # of generation
LARGEST_ID = 2**31  # of tokens

Kind = Literal["causal", "masked", "labels", "encoder"]

ENDINGS: dict[str, Kind] = {
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForSequenceClassification": "labels",
    "ForImageClassification": "labels",
    "Model": "encoder",
}


@checked
def from_pretrained(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    verify: bool = True,
    digest: str | None = None,
    **given: Any,
) -> Any:
    """Load a converted model: the original's architecture with its students, in evaluation mode.

    The folder comes from `segue convert`, or from a Hugging Face Trainer with Segue's callback.

        model = segue.from_pretrained("DIR")
        tokenizer = transformers.AutoTokenizer.from_pretrained("DIR")

    Args:
        folder: The folder of the converted model.
        dtype: That of the weights; by default the record's.
        verify: Refuse a folder with a file that is missing, changed or added.
        digest: Refuse a folder whose digest, which its card shows, is another one.
        given: Parts of the plan that could not be saved, such as your own student.
    """
    path = Path(folder)
    record = read_record(path)
    if verify or digest is not None:
        verified(path, record, digest)
    try:
        with hub_offline():
            model: Any = _built(record, dtype)
        checkpoint.rebuild_(model, record["segue"], _weights(path, record), given)
        if (path / GENERATION).is_file() and getattr(model, "generation_config", None) is not None:
            model.generation_config = _generation(type(model.generation_config), path / GENERATION)
    except SegueError:
        raise
    except Exception as error:  # of a record that does not fit itself; torch and transformers raise errors of many kinds
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    return model.eval()


def is_converted(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds a converted model."""
    if (Path(folder) / RECORD).is_file():
        return True
    config = Path(folder) / "config.json"
    return config.is_file() and b'"segue"' in files.content(config)


def read_record(folder: Path) -> dict[str, Any]:
    """Read the record of a converted model."""
    try:
        if (folder / RECORD).is_file():
            record: Any = _json(files.content(folder / RECORD))
            version = record.get("format") if isinstance(record, dict) else None
            if version not in (FORMAT, WITHOUT_MANIFEST):
                found = f"{RECORD} has format {version!r}; this version of Segue reads {FORMAT} and {WITHOUT_MANIFEST}."
                raise manifest.refused(folder, found, "load it with the version of Segue that wrote it.")
            parts = ("segue", "base") if version == FORMAT else ("segue", "base", "files")
            if not all(isinstance(record.get(part), dict) for part in parts):
                raise _damaged(folder, "a part of it is missing")
            return dict(record)
        config = json.loads(files.content(folder / "config.json"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, SegueError):
            raise
        raise manifest.refused(
            folder, f"{type(error).__name__}: {error}.", "give a folder that `segue convert` wrote."
        ) from None
    if not isinstance(config, dict) or not isinstance(config.get("segue"), dict):
        found = f"It has no {RECORD}, and its config.json has no record of a replacement."
        raise manifest.refused(folder, found, "load an ordinary model by transformers' AutoModel.")
    return {"segue": config.pop("segue"), "base": {"config": config}, "files": {}}


def _built(record: dict[str, Any], dtype: torch.dtype | None) -> nn.Module:
    """Build the original's architecture with random weights."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "a converted model needs transformers.", "It is not installed.", "pip install segue[hf]"
        ) from None
    saved = dict(record["base"]["config"])
    stored = dtype_of(saved.pop("dtype", None))
    config = build_config(saved)
    kind = model_class(config)
    make = getattr(kind, "_from_config", None) or kind.from_config
    with torch.random.fork_rng(devices=[]):
        model: nn.Module = make(config, dtype=dtype or stored)
    return model


def _generation(kind: Any, path: Path) -> Any:
    """Read the settings of generation that transformers declares."""
    saved = _generation_settings(path)
    return kind(**{name: saved[name] for name in vars(kind()) if name in saved})


def _generation_settings(path: Path) -> dict[str, Any]:
    saved = _json(files.content(path))
    if not isinstance(saved, dict):
        raise ValueError(f"{path.name} has no settings")
    for name, value in saved.items():
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if name.endswith("_token_id") and not all(isinstance(each, int) and abs(each) < LARGEST_ID for each in ids):
            raise ValueError(f"{name} is {value!r:.30}")
        if (name.startswith("output_") or name in FLAGS) and not (value is None or isinstance(value, bool)):
            raise ValueError(f"{name} is {value!r:.30}, not true or false")
    return saved


def _json(text: bytes) -> Any:
    """Read JSON as it is defined: Python's NaN and Infinity, and numbers too large for a float, are no part of it."""

    def number(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            raise ValueError(f"{digits[:30]} is no finite number")
        return value

    return json.loads(text, parse_constant=number, parse_float=number)


def _damaged(folder: Path, why: str) -> CheckpointError:
    return manifest.refused(folder, f"Its record cannot be read ({why}).")


def verified(folder: Path, record: dict[str, Any], digest: str | None = None) -> None:
    """Refuse files that are missing, changed or added, as far as the folder can tell."""
    if record.get("format") == FORMAT or (folder / manifest.FILE).exists():
        manifest.verify(folder, digest)
        return
    if digest is not None:
        raise manifest.refused(folder, f"It has no {manifest.FILE}, so that no digest covers it.", "load it without `digest`.")
    foreign = [path.name for path in folder.glob("*.safetensors") if record["files"] and path.name not in record["files"]]
    if foreign:
        raise manifest.refused(folder, f"{foreign[0]} is not part of it: {RECORD} does not name it.", "remove that file.")
    manifest.compare(folder, record["files"], RECORD)


def _weights(folder: Path, record: dict[str, Any]) -> dict[str, Tensor]:
    """Read the weights that the manifest or the record names, or all of a folder that Trainer wrote."""
    listed = manifest.listed(folder) if (folder / manifest.FILE).exists() else record.get("files", {})
    named = [folder / name for name in listed if name.endswith(".safetensors") and Path(name).name == name]
    found = named or sorted(folder.glob("*.safetensors"))
    if not found:
        raise manifest.refused(folder, "It has no safetensors file.")
    tensors: dict[str, Tensor] = {}
    for file in found:
        tensors |= tensor_files.read(file)
    return tensors


@dataclass
class Base:
    """A pretrained model in float32, its processor, and the kind of task it is for."""

    name: str
    model: nn.Module
    processor: Any  # a tokenizer, or the settings of an image processor
    kind: Kind
    config: dict[str, Any]  # as it was loaded; surgery may shorten it
    dtype: torch.dtype  # of its stored weights
    hash: str

    def reload(self) -> nn.Module:
        """Load the original again: modules of `model` may have been replaced."""
        return open_base(self.name).model

    def save_processor(self, folder: Path) -> None:
        """Save the tokenizer, or the settings of the image processor."""
        if self.reads_images:
            write_json(self.processor, folder / IMAGE_SETTINGS)
        else:
            self.processor.save_pretrained(folder)

    @property
    def revision(self) -> str | None:
        """The commit on the hub, where it comes from there."""
        return getattr(self.model.config, "_commit_hash", None)

    @property
    def reads_images(self) -> bool:
        """Whether its input is an image."""
        return bool(self.model.main_input_name == "pixel_values")

    @property
    def class_names(self) -> dict[str, int]:
        """The index of every class by its name."""
        return dict(getattr(self.model.config, "label2id", None) or {})

    @property
    def positions(self) -> int | None:
        """The longest text it has positions for."""
        longest = getattr(self.model.config, "max_position_embeddings", None)
        return longest if isinstance(longest, int) else None


def open_base(name: str, *, download: bool = True) -> Base:
    """Load a pretrained model with its tokenizer or image processor; pickled weights are refused."""
    fault = f"the model {name!r} cannot be converted."
    with nullcontext() if download else hub_offline(), _loading(fault):
        place, options = _place(name)
        if is_converted(place):
            model = from_pretrained(place, dtype=torch.float32)
            config = read_record(Path(place))["base"]["config"]
            stored = dtype_of(config.get("dtype"))
        else:
            if (Path(place) / GENERATION).is_file():  # transformers would leave a damaged one out in silence
                _generation_settings(Path(place) / GENERATION)
            settings, stored = _settings(place, options)
            model = _loaded(model_class(settings), place, {**options, "config": settings}, fault)
            config = plain_config(model.config, type(model).__name__, stored)
        processor = _processor(quiet_transformers(name), model, place, options)
    return Base(name, model, processor, _kind(model, fault), config, stored, tensor_files.fingerprint(model.state_dict()))


def outline(name: str, device: str = "meta") -> nn.Module:
    """Build what `open_base` loads, with the same module names and random weights; on the meta device they take no memory."""
    with _loading(f"the Hugging Face model {name!r} cannot be built."):
        place, options = _place(name)
        if is_converted(place):
            return cast(nn.Module, from_pretrained(place, dtype=torch.float32)).to(device)
        settings, _ = _settings(place, options)
        kind = model_class(settings)
        make = getattr(kind, "_from_config", None) or kind.from_config
        where: Any = torch.device(device)  # a context manager, though torch's types do not say so
        with where, torch.random.fork_rng(devices=[]):
            model: nn.Module = make(settings, dtype=torch.float32)
        return model


@contextmanager
def _loading(fault: str) -> Iterator[None]:
    try:
        yield
    except SegueError:
        raise
    except Exception as error:  # transformers raises errors of many libraries
        reason = (str(error).strip().splitlines() or [""])[0]
        hint = "give a folder with config.json, safetensors and a tokenizer, a GGUF file, or an id."
        raise ConfigError(fault, f"{type(error).__name__}: {reason}", hint) from error


def _settings(place: str, options: dict[str, Any]) -> tuple[Any, torch.dtype]:
    """Read a configuration without what would choose code, and the type of the stored weights."""
    found = quiet_transformers(place).AutoConfig.from_pretrained(place, trust_remote_code=False, **options)
    stored = found.dtype if isinstance(found.dtype, torch.dtype) else torch.float32
    return build_config(found.to_dict()), stored


def _loaded(kind: Any, place: str, options: dict[str, Any], fault: str) -> Any:
    """Load every weight, from safetensors or GGUF."""
    safe = {} if "gguf_file" in options else {"use_safetensors": True}
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # else only the first of several processes gets the weights
    model, found = kind.from_pretrained(place, dtype=torch.float32, output_loading_info=True, **safe, **options)
    if missing := sorted(found["missing_keys"]):
        hint = "give a complete model; train a new head first, without Segue."
        raise ConfigError(fault, f"Its files lack {len(missing)} weights ({missing[0]} first).", hint)
    return model.eval()


def _place(name: str) -> tuple[str, dict[str, Any]]:
    """Return a folder or id, and the GGUF file in it that is meant; `hf:` before a name says what it is anyway."""
    path = Path(name.removeprefix("hf:"))
    if path.suffix == ".gguf" and path.is_file():
        return str(path.parent), {"gguf_file": path.name}
    return name.removeprefix("hf:"), {}


def _kind(model: nn.Module, fault: str) -> Kind:
    name = type(model).__name__
    for ending, kind in ENDINGS.items():
        if name.endswith(ending):
            return kind
    raise ConfigError(fault, f"It is a {name}.", f"give a model whose class name ends in {', '.join(ENDINGS)}.")


def _processor(transformers: Any, model: nn.Module, place: str, options: dict[str, Any]) -> Any:
    if model.main_input_name != "pixel_values":
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)
        longest = tokenizer.model_max_length
        if isinstance(longest, bool) or not isinstance(longest, int | float):  # it would fail at the first text
            raise ValueError(f"model_max_length in tokenizer_config.json is {longest!r:.40}, not a number")
        return tokenizer
    path = transformers.utils.cached_file(place, IMAGE_SETTINGS)
    return json.loads(Path(path).read_text(encoding="utf-8"))
