"""Make torchvision import next to a CPU-only torch.

Torchvision's wheel from the package index is built for CUDA. Next to a CPU build of torch its compiled operators do not load,
and its import stops at "operator torchvision::nms does not exist"; timm and parts of transformers then fail too. Declaring
the schemas of the two operators that the import needs is enough; nothing here implements them, so calling them fails.
`import segue` prepares this, and it happens at the moment torchvision is imported.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any


def prepare_for_torchvision() -> None:
    """Declare the missing operators as soon as anything imports torchvision."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())


class _BeforeTorchvision:
    """Find nothing; act when torchvision is looked for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "torchvision":
            _declare_missing_operators()
        return None


_library: Any = None  # the declarations live as long as this object


def _declare_missing_operators() -> None:
    global _library
    spec = PathFinder.find_spec("torchvision")
    if spec is None:
        return
    import torch

    if _library is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    compiled = [file for place in spec.submodule_search_locations or () for file in Path(place).glob("_C.*")]
    try:
        if compiled:
            torch.ops.load_library(compiled[0])  # type: ignore[no-untyped-call]
    except OSError:
        compiled = []
    if not compiled:
        _library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
