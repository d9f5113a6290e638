"""What a folder may say about its model: fields that transformers' own class declares, with plain values; none chooses code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from segue.errors import CheckpointError, printable

PLACE = re.compile(r"[/\\:]")  # in ids of the hub, paths and addresses
WORDS_IN = ("id2label", "label2id", "rope_parameters", "ffn_act_fn")  # dicts of words that transformers itself reads


def build_config(saved: Mapping[str, Any]) -> Any:
    """Build a configuration from plain data.

    Only fields that the class of its model type declares are read, also in configurations inside it. All others are dropped:
    transformers would set any name as an attribute, and acts upon some of them (`attribute_map`, `auto_map`,
    `attn_implementation`).
    """
    return _built(_class_of(saved.get("model_type")), saved)


def plain_config(config: Any, architecture: str, stored: torch.dtype) -> dict[str, Any]:
    """Return a configuration as plain data from which it can be built again."""
    names = declared(config.__class__)
    kept = {name: value for name, value in config.to_dict().items() if name in names}
    return kept | {
        "model_type": config.model_type,
        "architectures": [architecture],
        "dtype": str(stored).removeprefix("torch."),
    }


def dtype_of(name: Any) -> torch.dtype:
    """Return torch's type of a saved name; float32 if there is none."""
    found = getattr(torch, str(name or "float32"), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"there is no dtype {name!r}.", "The configuration names it.", "check `dtype` in the record.")
    return found


def model_class(config: Any) -> Any:
    """Return transformers' own class for a configuration; code that a folder brings is never used.

    Where it names none, a language model is meant, or the plain model if there is no such class.
    """
    import transformers

    names = [name for name in (config.architectures or []) if hasattr(transformers, name)]
    language: Any = transformers.AutoModelForCausalLM
    usual = language if type(config) in language._model_mapping else transformers.AutoModel
    kind = getattr(transformers, names[0]) if names else usual
    root = transformers.PreTrainedModel
    known = isinstance(kind, type) and kind is not root and issubclass(kind, root)
    if names and not known:
        found = f"The architectures in the configuration are {config.architectures}."
        raise CheckpointError(f"{names[0]} is not a model class of transformers.", found, "check them in config.json.")
    return kind


@cache
def declared(kind: Any) -> frozenset[str]:
    """Return the names that a class of configurations declares: its constructor's, and what it always sets itself."""
    import transformers

    parents = [parent for parent in kind.__mro__ if parent is not object]
    parameters = [each for parent in parents for each in inspect.signature(parent).parameters.values()]
    names = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    own = [parent for parent in parents if parent not in transformers.PreTrainedConfig.__mro__]
    names |= {name for parent in own for name, value in vars(parent).items() if isinstance(value, property) and value.fset}
    with suppress(Exception):  # a few classes have no default instance
        names |= {name for name in vars(kind()) if not name.startswith("_")}
    return frozenset(names)


@cache
def _flags(kind: Any) -> frozenset[str]:
    """Return the names of fields that are true or false unless they are set: transformers takes anything for true."""
    with suppress(Exception):  # a few classes have no default instance
        return frozenset(name for name, value in vars(kind()).items() if isinstance(value, bool))
    return frozenset()


def _built(kind: Any, saved: Mapping[str, Any]) -> Any:
    """Build a configuration and those inside it; its constructor gets declared names and plain values only."""
    inner, defaults = getattr(kind, "sub_configs", None) or {}, getattr(kind, "sub_configs_defaults", None) or {}
    fields = {}
    for name in sorted(declared(kind) & set(saved) - {"model_type"}):
        value = saved[name]
        if isinstance(value, Mapping) and (name in inner or "model_type" in value):
            known = isinstance(inner.get(name), type) and hasattr(inner[name], "model_type")  # else AutoConfig: any type
            usual = getattr(defaults.get(name), "model_type", None)
            fields[name] = _built(inner[name] if known else _class_of(value.get("model_type", usual)), value)
        else:
            _require_plain(kind, name, value)
            if name in _flags(kind) and not (value is None or isinstance(value, bool)):
                raise _refused(kind, f"Its field {name!r} is {value!r:.60}, not true or false.")
            fields[name] = value
    try:
        return kind(**fields)
    except Exception as error:  # of its own checks
        reason = " ".join(str(error).split())
        raise _refused(kind, f"transformers raises {type(error).__name__}: {reason:.120}") from error


def _class_of(model_type: Any) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        hint = "check `model_type`, or update transformers."
        raise CheckpointError(f"transformers has no model type {model_type!r}.", "The configuration names it.", hint)
    return CONFIG_MAPPING[model_type]


def _require_plain(kind: Any, name: str, value: Any) -> None:
    """Refuse the name of a place, and words for other libraries: timm would load the file that `model_args` names."""
    if any(printable(text) != text for text in _words(value)):  # transformers may log it
        raise _refused(kind, f"Its field {name!r} has control characters: {value!r:.60}.")
    if isinstance(value, str) and PLACE.search(value):
        raise _refused(kind, f"Its field {name!r} names a place: {value!r:.60}.")
    if isinstance(value, dict) and name not in WORDS_IN and any(True for _ in _words(value)):
        raise _refused(kind, f"Its field {name!r} has settings that are not numbers: {value!r:.60}.")
    if isinstance(value, list | tuple):
        for each in value:
            _require_plain(kind, name, each)


def _words(value: Any) -> Iterator[str]:
    """Return every text in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _words(each)


def _refused(kind: Any, found: str) -> CheckpointError:
    hint = "a model may be described by what transformers' class declares, and only by numbers and single words."
    return CheckpointError(f"the configuration of a {kind.model_type!r} model is refused.", found, hint)
