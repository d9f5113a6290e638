"""Count what a step costs: floating-point operations, and bytes kept for the backward pass. No clocks here."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from segue.evaluation import LossFn, padding_mask
from segue.handover import replace_
from segue.moment import moment
from segue.plan import Plan


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


class StepFlops:
    """Count what the steps of a handover cost, each kind of step once, by taking a real one on a copy of the model."""

    def __init__(self, model: nn.Module, plan: Plan, total: int, batch: Any, loss_fn: LossFn) -> None:
        model = copy.deepcopy(model).train()
        self.handover = replace_(model, dataclasses.replace(plan, release=False), total_steps=total)
        self.total = total
        self.batch = batch
        self.loss_fn = loss_fn
        self._known: dict[tuple[Any, ...], int] = {}
        self._first = True

    def __call__(self, step: int) -> int:
        """Return the operations of one step: forward, guidance, distillation and backward."""
        kind = self._kind(step)
        if kind not in self._known:
            if self._first and step > 0:
                self(0)  # the first forward compares the two sides, which no later one does
            self._known[kind] = self._count(step)
        return self._known[kind]

    def students_alone(self) -> int:
        """Return the operations of a step in which nothing but students runs."""
        with torch.random.fork_rng(devices=[]), self.handover.as_student():
            return flops(lambda: self._backward(self.loss_fn(self.handover.model, self.batch)))

    def teacher_pass(self) -> int:
        """Return the operations of one forward of the untouched model."""
        with torch.no_grad(), self.handover.as_teacher():
            return flops(lambda: self.loss_fn(self.handover.model, self.batch))

    def _kind(self, step: int) -> tuple[Any, ...]:
        """Name the kind of a step: what the first site does, and how many of the others do what.

        Sites of one plan are mostly alike and so cost the same; before the first, no gradient is needed.
        """
        now = moment(self.handover.plan, self.handover.sites, step, self.total)
        first, *others = (
            (site.closed, site.hold, 0.0 < site.weight < 1.0, site.weight == 1.0, site.guidance > 0)
            for site in now.sites.values()
        )
        return step == 0, now.distill > 0, first, *sorted(Counter(others).items())

    def _count(self, step: int) -> int:
        self._first = False
        self.handover.resume_at(step)
        with torch.random.fork_rng(devices=[]):
            return flops(self._step)

    def _step(self) -> None:
        loss = self.loss_fn(self.handover.model, self.batch)
        self._backward(loss + self.handover.aux_loss(padding_mask(self.batch)))

    def _backward(self, loss: Tensor) -> None:
        trained = list(self.handover.parameters())
        torch.autograd.grad(loss, trained, allow_unused=True)
