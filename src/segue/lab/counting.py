"""Count what a step costs: floating-point operations, and bytes kept for the backward pass. No clocks here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def flops(run: Callable[[], object]) -> int:
    """Count the operations of matrix products and convolutions, forward and backward.

    Attention runs as plain matrix products meanwhile, because the counter sees none in the CPU's fused kernel.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def saved_bytes(run: Callable[[], object], beside: Iterable[Tensor]) -> int:
    """Count the bytes that autograd keeps for backward, each storage once, `beside` those of the given tensors."""
    known = {tensor.untyped_storage().data_ptr() for tensor in beside}
    kept: dict[int, torch.UntypedStorage] = {}  # holding on to the storages keeps their addresses unique

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor.detach()  # not the tensor itself: an output that its own graph holds would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in kept.values())
