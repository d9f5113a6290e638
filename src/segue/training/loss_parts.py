"""The parts of the loss of a step: of the task, of guidance and of distillation, by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from segue.core.handover import Handover
from segue.plan import Plan


class LossParts:
    """Add up what the loss of a step is made of; nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: dict[str, Tensor] = {}
        self.means: dict[str, float] = {}  # over all processes, of the latest step

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors.values())

    def begin(self, **parts: Tensor) -> None:
        """Forget the step before."""
        self.tensors = dict(parts)

    def add(self, handover: Handover, task: Tensor, share: float) -> None:
        """Add the parts of a batch, which are computed already."""
        if handover.phase is None or handover.phase.task > 0:
            self._add("task", task * share)
        for name, part in handover.auxiliary.latest.items():
            self._add(name.partition("/")[0], part * share)

    def _add(self, name: str, part: Tensor) -> None:
        value = part.detach().float().to(self.device)
        self.tensors[name] = self.tensors[name] + value if name in self.tensors else value

    def take(self, values: Sequence[float]) -> list[float]:
        """Take the means of the parts from the front of what processes have added up, and return the rest."""
        self.means = dict(zip(self.tensors, values, strict=False))
        return list(values[len(self.tensors) :])

    def text(self, plan: Plan) -> str:
        """Name the parts, unless the task is all there is.

        >>> parts = LossParts(torch.device("cpu"))
        >>> parts.means = {"task": 0.25, "guidance": 0.5}
        >>> from segue.methods import dcr_dfg
        >>> parts.text(dcr_dfg(sites="*"))
        'loss = task 0.25 + FeatureGuidance 0.5'
        """
        if not set(self.means) - {"task"}:
            return ""
        names = {"guidance": _name(plan.guidance), "distill": _name(plan.distill)}
        return "loss = " + " + ".join(f"{names.get(part, part)} {value:.4g}" for part, value in self.means.items())


def _name(loss: object) -> str:
    return getattr(loss, "__name__", type(loss).__name__)
