"""Folders with converted models: a plain transformers model comes back, and nothing in the folder is ever run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segue.checkpoint import folders as checkpoint_files
from segue.checkpoint import state as checkpoint
from segue.core import tensor_files
from segue.errors import CheckpointError, MissingExtraError, SegueError

RECORD = "segue.json"
FORMAT = 1
NOT_FROM_A_FOLDER = ("auto_map", "attn_implementation", "_attn_implementation", "experts_implementation")  # may name code


def from_pretrained(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, verify: bool = True, **given: Any
) -> Any:
    """Load a converted model: the original's architecture with its students, in evaluation mode.

    The folder was written by `segue convert`, or by a Hugging Face Trainer with Segue's callback. Weights whose hash differs
    from the record are refused; `verify=False` does not look. `dtype` is the record's if not given. `given` supplies parts of
    the plan that could not be saved, such as your own student.
    """
    path = Path(folder)
    record = read_record(path)
    if verify:
        _verify(path, record)
    try:
        model = _built(record, dtype)
        checkpoint.rebuild_(model, record["segue"], _weights(path, record), given)
        _adopt_generation_settings_(model, path)
    except SegueError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    return model.eval()


def is_converted(folder: str | os.PathLike[str]) -> bool:
    """Tell whether a folder holds a converted model."""
    if (Path(folder) / RECORD).is_file():
        return True
    config = Path(folder) / "config.json"
    return config.is_file() and '"segue"' in config.read_text(encoding="utf-8", errors="replace")


def read_record(folder: Path) -> dict[str, Any]:
    """Read what was replaced in the model of a folder."""
    asked = f"a converted model was to be loaded from {folder}."
    try:
        if (folder / RECORD).is_file():
            record: Any = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            version = record.get("format") if isinstance(record, dict) else None
            if version != FORMAT:
                found = f"{RECORD} has format {version!r}; this version of Segue reads {FORMAT}."
                raise CheckpointError(asked, found, "load it with the version of Segue that wrote it.")
            if not all(isinstance(record.get(part), dict) for part in ("segue", "base", "files")):
                raise _damaged(folder, "It lacks a part")
            return dict(record)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(asked, f"{type(error).__name__}: {error}.", "give a folder that `segue convert` wrote.") from None
    if not isinstance(config.get("segue"), dict):
        raise CheckpointError(
            asked,
            f"There is no {RECORD} in it, and its config.json carries no record of a replacement.",
            "an ordinary model is loaded by transformers' AutoModel.",
        )
    return {"segue": config.pop("segue"), "base": {"config": config}, "files": {}}


def model_class(config: Any) -> Any:
    """Return transformers' own class for a configuration; code that a folder brings is never used."""
    import transformers

    names = [name for name in (config.architectures or []) if hasattr(transformers, name)]
    kind = getattr(transformers, names[0]) if names else transformers.AutoModelForCausalLM
    root = transformers.PreTrainedModel
    known = isinstance(kind, type) and kind is not root and issubclass(kind, root)
    if names and not known:
        raise CheckpointError(
            "a model was to be built.", f"{names[0]} is no model of transformers.", "check `architectures` in config.json."
        )
    return kind


def _built(record: dict[str, Any], dtype: torch.dtype | None) -> nn.Module:
    """Build the original's architecture with random weights."""
    try:
        import transformers
    except ImportError:
        raise MissingExtraError(
            "a converted model was to be loaded.", "transformers is not installed.", "pip install segue[hf]"
        ) from None
    settings = _only_data(record["base"]["config"])
    stored = settings.pop("dtype", None) or "float32"
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    kind = model_class(config)
    make = getattr(kind, "_from_config", None) or kind.from_config
    with torch.random.fork_rng(devices=[]):
        model: nn.Module = make(config, dtype=dtype or getattr(torch, stored))
    return model


def _only_data(config: Any) -> Any:
    """Leave out settings by which a folder could choose code."""
    if isinstance(config, dict):
        return {name: _only_data(value) for name, value in config.items() if name not in NOT_FROM_A_FOLDER}
    return config


def _damaged(folder: Path, why: str) -> CheckpointError:
    asked = f"a converted model was to be loaded from {folder}."
    return CheckpointError(asked, f"Its record cannot be read ({why}).", "copy the whole folder again.")


def _verify(folder: Path, record: dict[str, Any]) -> None:
    """Refuse files that are missing, changed, or not the record's."""
    asked = f"a converted model was to be loaded from {folder}."
    foreign = [path.name for path in folder.glob("*.safetensors") if record["files"] and path.name not in record["files"]]
    if foreign:
        raise CheckpointError(asked, f"{foreign[0]} is not part of it: {RECORD} does not name it.", "take the file away.")
    for name, expected in record["files"].items():
        if not (folder / name).is_file():
            raise CheckpointError(asked, f"{name} is missing.", "copy the whole folder again.")
        if checkpoint_files.hash_file(folder / name) != expected:
            raise CheckpointError(
                asked,
                f"{name} is not the file that was written: its hash differs from {RECORD}.",
                "copy the folder again; if the change is yours, from_pretrained(..., verify=False).",
            )


def _weights(folder: Path, record: dict[str, Any]) -> dict[str, Tensor]:
    """Read the files that the record names; a folder of Trainer's names none."""
    named = [folder / name for name in record["files"] if name.endswith(".safetensors")]
    files = named or sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"a converted model was to be loaded from {folder}.", "It holds no safetensors.", "copy the whole folder again."
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= tensor_files.read(file)
    return tensors


def _adopt_generation_settings_(model: Any, folder: Path) -> None:
    if (folder / "generation_config.json").is_file() and getattr(model, "generation_config", None) is not None:
        model.generation_config = type(model.generation_config).from_pretrained(folder)
