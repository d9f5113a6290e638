"""Weights that must stay finite: checked before a checkpoint is written and before fit() returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from segue.core.blending import blendable
from segue.core.handover import Handover
from segue.core.tensor_files import local
from segue.errors import TrainingError
from segue.sites import is_seam
from segue.training.distributed import Processes
from segue.training.places import owner, plain_name
from segue.training.trace import finite


class FiniteWeights:
    """The parameters and buffers of a training, which an optimizer step may make inf or NaN.

    What does not train is not broken if it is a mask, of zeros and -inf. Another tensor that is not finite to begin with may
    stay so only if it does no harm, which shows by the first step that is not skipped.
    """

    def __init__(self, model: nn.Module, handover: Handover | None, processes: Processes) -> None:
        self.model, self.handover, self.processes = model, handover, processes
        self.before = {name for name in self._broken() if not _trains(model, name)}

    def require(self, done: int, total: int, checkpoint: Path | None, *, skipped: int = 0) -> None:
        """Raise if a parameter or buffer is inf or NaN, in all processes alike."""
        harmless = set() if 0 < done == skipped else self.before
        broken = [name for name in self._broken() if name not in harmless]
        if not broken:
            return
        first = broken[0]
        already = ", and was so before: every step is skipped" if first in self.before else ""
        others = f", as are {len(broken) - 1} other weights and buffers" if len(broken) > 1 else ""
        good = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint (give fit a folder)"
        raise TrainingError(
            f"{plain_name(first, self.handover)!r} is inf or NaN after {done} of {total} steps.",
            f"It is a {self._kind(first)}{owner(first, self.handover)}{others}{already}; nothing is saved of it.",
            f"{good}; lower lr, raise eps, or look at what else writes to it.",
        )

    @torch.no_grad()
    def _broken(self) -> list[str]:
        """Return the names of what is not finite in any process, with one synchronisation for all that is finite."""
        named = {name: local(tensor) for name, tensor in self._named()}
        flags = _not_finite(list(named.values()), self.processes.device).tolist()
        trained = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        broken = {name: flag and (name in trained or not finite(named[name])) for name, flag in zip(named, flags, strict=True)}
        anywhere = self.processes.total(torch.tensor(list(map(float, broken.values())))).tolist()
        return [name for name, flag in zip(named, anywhere, strict=True) if flag]

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        seams = {name for name, module in self.model.named_modules() if is_seam(module)}
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if blendable(tensor) and name.rpartition(".")[0] not in seams:
                yield name, tensor

    def _kind(self, name: str) -> str:
        return "weight" if name in dict(self.model.named_parameters()) else "buffer"


def _trains(model: nn.Module, name: str) -> bool:
    return any(name == other and parameter.requires_grad for other, parameter in model.named_parameters())


def _not_finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return 1 for every tensor with inf or NaN, else 0: the largest absolute value of each is finite only if all are."""
    filled = [index for index, tensor in enumerate(tensors) if tensor.numel()]  # a rank may hold nothing of a sharded one
    flags = torch.zeros(len(tensors), device=device)
    if filled:
        chosen = [tensors[index] for index in filled]
        numbers = [tensor.float() if tensor.element_size() == 1 else tensor for tensor in chosen]  # float8 has no norm
        largest = torch._foreach_norm(numbers, float("inf"))
        flags[filled] = torch.stack([(~torch.isfinite(norm)).float().to(device) for norm in largest])
    return flags
