"""The step of a local phase: one forward of the original model, then updates of the students from its features."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from segue.core.blending import padding_mask
from segue.core.handover import Handover
from segue.core.tensor_files import full
from segue.errors import ConfigError
from segue.phases import Phase
from segue.plan import Plan
from segue.training.distributed import Processes
from segue.training.nonfinite import MicroBatch
from segue.training.tasks import scalar

if TYPE_CHECKING:
    from segue.training.fit import Loop


def has_updates(phase: Phase | None) -> bool:
    """Return whether a step of a phase is more, or less, than one update of all students."""
    return phase is not None and (phase.split, phase.reuse, phase.tolerance) != (1, 1, 0.0)


def from_features(phase: Phase | None, *, sharded: bool = False) -> bool:
    """Return whether the students of a phase learn from features alone, with no loss on the output of the model."""
    return has_updates(phase) or (phase is not None and phase.local and phase.task == 0 and not sharded)


def needs_output(handover: Handover, phase: Phase) -> bool:
    """Return whether a forward for features must be complete: for its loss, or for what it changes after the last site."""
    plan = handover.plan
    still = plan.train == "students" and plan.backbone == "eval" and plan.unreached == "error"
    return phase.task > 0 or not still or any(site.is_span for site in handover.sites)


def refuse_unfit(plan: Plan, *, accumulate: int, sharded: bool) -> None:
    """Refuse settings that leave no place for several updates in one step."""
    phase = next((phase for phase in plan.phases if has_updates(phase)), None)
    if phase is None:
        return
    for wrong, found, hint in (
        (accumulate > 1, f"{accumulate} batches are accumulated for one update.", "take each batch on its own"),
        (sharded, "FSDP2 gathers weights in forwards of the model alone.", "do not shard"),
        (
            plan.train == "all" and phase.task > 0,
            "Plan(train='all') trains the model around the students by the task, which takes its own forward.",
            "set Phase(task=0.0), or Plan(train='students')",
        ),
    ):
        if wrong:
            raise ConfigError(
                f"the phase {phase.name!r} cannot take several updates in one step.",
                found,
                f"{hint}; or leave split, reuse and tolerance out of the phase. Nothing was changed.",
            )


def backward(loop: Loop, handover: Handover, phase: Phase) -> tuple[list[MicroBatch], Tensor, Tensor]:
    """Take every update of a step but the last one, whose gradients are left; return its batches, the mean loss and its parts.

    An update that is not finite is left as the last one. Only a step of one update has several batches.
    """
    accumulate = loop.recipe.accumulate
    none = torch.zeros((), device=loop.accelerator.device)
    micros, task = [], none
    losses: list[Tensor] = []  # of each update: the guidance and, for a guard, that of each site
    for _ in range(accumulate):
        batch, weight = loop.processes.part(next(loop.stream))
        micros.append(MicroBatch.of(batch))
        complete, output = needs_output(handover, phase), none
        with handover.features(padding_mask(batch), complete=complete) as features, loop.accelerator.autocast():
            output = handover.weighted(scalar(loop.loss_fn(loop.model, batch)))
        task = task + output.float() * weight / accumulate
        parts = parts_of(features.rows, phase.split, loop.processes) if features.calls else []
        for begin, share in parts * phase.reuse:
            if losses and has_updates(phase) and not _update(loop):
                break
            with loop.accelerator.autocast():
                loss = features.loss(begin, phase.split, measured=phase.tolerance > 0) * share
            loop.accelerator.backward(loss / accumulate if accumulate > 1 else loss)
            average_gradients(loop.parameters, loop.processes.world)
            of_sites = [] if loop.guard is None else [features.parts.get(name, none).float() * share for name in handover.seams]
            losses.append(torch.stack([loss.detach().float(), *of_sites]))
        features.observe(lambda errors: loop.processes.total(errors) / loop.processes.world)
    guidance = torch.stack(losses).mean(0) if losses else none.expand(1 + len(handover.seams))
    loop.parts.begin(**({"task": task} if phase.task > 0 else {}), guidance=guidance[0])
    return micros, task + guidance[0], guidance


def parts_of(rows: int, split: int, processes: Processes) -> list[tuple[int, float]]:
    """Return where each sub-batch begins in this process, and the weight of its rows in the mean over processes.

    The rows of all processes together are cut as one process cuts them; one that has no row of a sub-batch gives its first
    with a weight of 0.
    """
    everywhere = torch.zeros(processes.world)
    everywhere[processes.rank] = rows
    counts = [int(count) for count in processes.total(everywhere).tolist()]
    found = []
    for part in range(min(split, sum(counts))):
        begins = [(part - sum(counts[:rank])) % split for rank in range(processes.world)]
        sizes = [len(range(begin, count, split)) for begin, count in zip(begins, counts, strict=True)]
        mine = sizes[processes.rank]
        found.append((begins[processes.rank] if mine else 0, mine * processes.world / sum(sizes)))
    return found


def _update(loop: Loop) -> bool:
    """Take one update with the gradients as they are; return whether they are finite."""
    loop.accelerator.unscale_gradients()
    norm = full(nn.utils.get_total_norm([p.grad for p in loop.parameters if p.grad is not None]))
    if loop.accelerator.scaler is None and not math.isfinite(norm.item()):
        return False
    if loop.recipe.clip is not None:
        nn.utils.clip_grads_with_norm_(loop.parameters, loop.recipe.clip, norm)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return True


def average_gradients(parameters: Iterable[Tensor], world: int) -> None:
    """Average the gradients over processes: students that are called outside of the model's forward do not pass DDP."""
    if world == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for same in by_dtype.values():
        flat = torch.cat([gradient.flatten() for gradient in same])
        torch.distributed.all_reduce(flat)
        flat /= world
        for gradient, mean in zip(same, torch.split(flat, [gradient.numel() for gradient in same]), strict=True):
            gradient.copy_(mean.view_as(gradient))
