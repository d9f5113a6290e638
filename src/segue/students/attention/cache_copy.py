"""Copies of key/value caches, for whoever may not write to the one that a call brings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor


def copy_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy the caches of a call as they are now."""
    return with_caches(copy_state, args, kwargs)


def with_caches(
    change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Change the caches of a call."""
    if not any(is_cache(x) for x in args) and not any(is_cache(x) for x in kwargs.values()):
        return args, kwargs
    return (
        tuple(change(x) if is_cache(x) else x for x in args),
        {key: change(x) if is_cache(x) else x for key, x in kwargs.items()},
    )


def is_cache(x: Any) -> bool:
    """Recognise a key/value cache of Hugging Face."""
    return not isinstance(x, Tensor) and hasattr(x, "update") and hasattr(x, "get_seq_length")


def copy_state(x: Any) -> Any:
    """Copy a cache with its tensors (some kinds are written in place), keeping their graph, which deepcopy refuses to do."""
    if isinstance(x, Tensor):
        return x.clone()
    if isinstance(x, list | tuple):
        return type(x)(copy_state(value) for value in x)
    if isinstance(x, dict):
        return {key: copy_state(value) for key, value in x.items()}
    layered = hasattr(x, "update") or hasattr(x, "lazy_initialization")  # a cache, or a layer of one: of keys, or of states
    if layered and not isinstance(x, type):  # it may name the class of its layers
        result = copy.copy(x)
        result.__dict__ = {key: copy_state(value) for key, value in x.__dict__.items()}
        return result
    return x
