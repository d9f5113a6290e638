"""What Hugging Face models record on the side: attentions and hidden states, by hooks on their modules.

While both sides of a seam run, each would be recorded, and the model would return twice as many attentions as it has layers. So
each side's records are taken aside, blended like its output, and recorded once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def taken_aside() -> Iterator[dict[str, list[Any]]]:
    """Collect what is recorded inside, without recording it."""
    collector = _collector()
    records = None if collector is None else collector.get()
    taken: dict[str, list[Any]] = {}
    if collector is None or records is None:
        yield taken
        return
    # a copy, not an empty list: the hooks look at how many layers came before
    trial = {key: list(value) if _is_list_of_records(key, value) else value for key, value in records.items()}
    token = collector.set(trial)
    try:
        yield taken
    finally:
        collector.reset(token)
        for key, value in records.items():
            if _is_list_of_records(key, value) and len(trial[key]) > len(value):
                taken[key] = trial[key][len(value) :]


def record(taken: dict[str, list[Any]]) -> None:
    """Record what was taken aside."""
    for key, values in taken.items():
        _collector().get()[key].extend(values)


def same_layout(a: dict[str, list[Any]], b: dict[str, list[Any]]) -> bool:
    """Tell whether two sides recorded the same things, so that they can be blended."""
    return a.keys() == b.keys() and all(len(a[key]) == len(b[key]) for key in a)


def _collector() -> Any:
    if torch.compiler.is_compiling():
        return None
    return getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)


def _is_list_of_records(key: str, value: Any) -> bool:
    return isinstance(value, list) and not key.startswith("_")
