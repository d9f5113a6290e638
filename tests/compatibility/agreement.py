"""Compare what a file says with the object that was rebuilt from it, name by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from . import RENAMED

MARKS = ("kind", "format")
CHANGED = {("students.Library", "name"): lambda name: name.removeprefix("fla:")}  # values that are written otherwise today


def assert_agrees(written: Any, rebuilt: Any, kind: str | None = None) -> None:
    """Find every class and field of a file again; what RENAMED says is gone may be gone.

    `kind` is the name of the class where the file does not say it.
    """
    if isinstance(written, dict) and "mapping" in written:
        assert isinstance(rebuilt, Mapping)
        assert list(rebuilt) == list(written["mapping"])
        for name, value in written["mapping"].items():
            assert_agrees(value, rebuilt[name])
    elif isinstance(written, dict) and (kind or "kind" in written):
        kind = kind or written["kind"]
        now = RENAMED.get(kind, kind)
        if now is None:
            return
        assert type(rebuilt).__name__ == now.rpartition(".")[2]
        for name, value in written.items():
            field = RENAMED.get(f"{kind}.{name}", name)
            if name not in MARKS and field is not None:
                assert_agrees(CHANGED.get((kind, name), lambda same: same)(value), getattr(rebuilt, field))
    elif isinstance(written, list):
        assert isinstance(rebuilt, tuple | list)
        assert len(rebuilt) == len(written)
        for value, part in zip(written, rebuilt, strict=True):
            assert_agrees(value, part)
    else:
        assert rebuilt == written
        assert type(rebuilt) is type(written)


def assert_same_weights(found: dict[str, Tensor], file: Path, tolerance: float = 1e-6) -> None:
    """Compare weights with a file: bit for bit where the processor computes alike, else to a few digits."""
    wanted = load_file(file)
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name].detach(), value, rtol=tolerance, atol=tolerance, msg=lambda text, at=name: f"{at}: {text}"
        )
