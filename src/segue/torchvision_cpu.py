"""Make torchvision import beside a CPU-only torch.

Torchvision's wheel from the package index is built for CUDA. Beside a CPU build of torch its compiled operators do not load,
and its import stops at "operator torchvision::nms does not exist"; timm and parts of transformers then fail too. Declaring
the schemas of the two operators that the import looks for is enough; nothing here implements them, so calling them fails.
"""

from __future__ import annotations

import torch

_library: torch.library.Library | None = None  # the declarations live as long as this object


def declare_missing_operators() -> None:
    """Declare `nms` and `qnms` unless torchvision's own are there; call it before importing torchvision or timm."""
    global _library
    if _library is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return
    except RuntimeError:
        _library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
