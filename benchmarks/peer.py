"""The same distillation by torchdistill, from the package index, with its own training box and its own step.

Command: none of its own; needs `pip install "segue[bench]"`, and is left out of every table where that is missing.
Expected: the loss of our distillation to rounding, and about its time: both pay for a full forward of the original.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import segue
from benchmarks import machine
from benchmarks.trainees import KL, LEARNING_RATE, TORCHDISTILL, Bench, Trainee

WHAT = (
    "`DistillationBox` with `KDLoss` (temperature {temperature:g}, task loss and KL each of weight 1, as in our own), its step "
    "`pre_forward_process`, `forward_process`, `post_forward_process`; no data loader, no logging, frozen teacher in evaluation"
)


def missing() -> str | None:
    """Say why torchdistill cannot be measured, or nothing if it can."""
    return None if machine.installed("torchdistill") else "torchdistill is not installed"


def temperature() -> float:
    return segue.losses.LogitDistillation().temperature


class Boxed(Trainee):
    """A student model in torchdistill's box, with a full copy of the original as its teacher."""

    def __init__(self, bench: Bench, student: Trainee) -> None:
        self.model, self.batch, self.handover = student.model, bench.batch, None
        self.teacher = copy.deepcopy(bench.original).eval()
        self._fill_box()

    def _fill_box(self) -> None:
        from torchdistill.core.distillation import DistillationBox

        cpu = torch.device("cpu")
        self.box: Any = DistillationBox(self.teacher, self.model, {}, configuration(), cpu, None, False, 1)
        self.box.pre_epoch_process()
        self.optimizer = self.box.optimizer

    def loss(self) -> Tensor:
        images, labels = self.batch
        self.box.pre_forward_process()
        loss: Tensor = self.box.forward_process(images, labels)
        return loss

    def step(self) -> None:
        self.box.post_forward_process(loss=self.loss())

    def compile(self, backend: str) -> None:
        self.model.compile(backend=backend)
        self.teacher.compile(backend=backend)

    def held(self) -> Iterable[Tensor]:
        yield from super().held()
        yield from self.teacher.parameters()
        yield from self.teacher.buffers()


def configuration() -> dict[str, Any]:
    """Say in torchdistill's words what `segue.methods.distillation` does."""
    logits = {
        f"{side}_module_{what}": value for side in ("student", "teacher") for what, value in (("path", "."), ("io", "output"))
    }
    loss = {**logits, "temperature": temperature(), "alpha": 1.0, "beta": 1.0, "reduction": "batchmean"}
    terms = {"kd": {"criterion": {"key": "KDLoss", "kwargs": loss}, "weight": 1.0}}
    return {
        "num_epochs": 1,
        "teacher": {"forward_proc": "forward_batch_only", "requires_grad": False},
        "student": {"forward_proc": "forward_batch_only"},
        "optimizer": {"key": "AdamW", "kwargs": {"lr": LEARNING_RATE}},
        "criterion": {"key": "WeightedSumLoss", "kwargs": {"sub_terms": terms}},
    }


def box_of_copies(bench: Bench, ours: Trainee) -> Boxed:
    """Box a hand-built model whose students are copies of those of our own distillation."""
    assert ours.handover is not None
    return Boxed(bench, bench.by_hand(students={name: seam.student for name, seam in ours.handover.seams.items()}))


def add_to(trainees: dict[str, Trainee], bench: Bench) -> float | None:
    """Add torchdistill where it is installed; return by how much its first loss differs from ours, relatively."""
    if missing():
        return None
    boxed = box_of_copies(bench, trainees[KL])
    ours, theirs = trainees[KL].loss().item(), boxed.loss().item()
    trainees[TORCHDISTILL] = boxed
    return abs(ours - theirs) / abs(theirs)
