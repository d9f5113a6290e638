"""Models with their optimizers: every way of training that is compared, made from copies of one original.

Command: none of its own; every measurement of `make bench` uses it.
Expected: in all of them the students train, the rest is frozen, and the optimizer is the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import segue
from benchmarks.settings import Settings
from benchmarks.timing import Step
from segue.diagnostics.counting import flops
from segue.schedules import Constant

Batch = tuple[Tensor, Tensor]
Join = Callable[[nn.Module, nn.Module], nn.Module]

BY_HAND = "student-only, built by hand"
AGAIN = "the same, built again"
VIEW = "student-only view"
TAKEOVER = "after takeover"
FINALIZED = "finalized"
BLEND_BY_HAND = "blend, built by hand"
BLEND = "DCR blend"
GUIDED = "DCR + DFG"
THESEUS = "Theseus"
GUMBEL = "Theseus-Gumbel"
KL = "KL distillation, Segue"
TORCHDISTILL = "KL distillation, torchdistill"
TEACHERS = "teachers' forward alone"
LEARNING_RATE = 1e-6


class Trainee:
    """A model with its optimizer: one training step, or its forward and loss alone."""

    def __init__(self, model: nn.Module, batch: Batch, handover: segue.Handover | None = None) -> None:
        self.model, self.batch, self.handover = model.train(), batch, handover
        trained = [p for p in model.parameters() if p.requires_grad] if handover is None else handover.parameters()
        self.optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)

    def loss(self) -> Tensor:
        images, labels = self.batch
        loss = F.cross_entropy(self.model(images), labels)
        return loss if self.handover is None else loss + self.handover.aux_loss()

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.handover is not None:
            self.handover.step()

    def flops(self) -> int:
        """Count the operations of forward, loss and backward; the optimizer has no products."""
        counted = flops(lambda: self.loss().backward())
        self.optimizer.zero_grad()
        return counted

    def compile(self, backend: str) -> None:
        self.model.compile(backend=backend)

    def held(self) -> Iterable[Tensor]:
        """Yield the parameters and buffers that stay in memory while it trains."""
        yield from self.model.parameters()
        yield from self.model.buffers()


class ViewedTrainee(Trainee):
    """The students of a running handover, trained under `as_student()`."""

    def loss(self) -> Tensor:
        assert self.handover is not None
        with self.handover.as_student():
            return super().loss()


class BlendByHand(nn.Module):
    """The shortest blend that does the same: what a user would write for one model."""

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            teacher = self.teacher(*args, **kwargs)
        return torch.lerp(teacher, self.student(*args, **kwargs), 0.5)


def student_alone(teacher: nn.Module, student: nn.Module) -> nn.Module:
    """Join the two by leaving the teacher out."""
    return student


class Bench:
    """One original model and one batch; builds every trainee from copies of them."""

    def __init__(self, settings: Settings, batch: int, image: int | None = None, count: int | None = None) -> None:
        import timm

        torch.manual_seed(0)
        image = image or settings.image
        options = {"num_classes": settings.classes, "img_size": image, **settings.model_options}
        self.original: nn.Module = timm.create_model(settings.model, pretrained=False, **options)
        self.batch: Batch = torch.randn(batch, 3, image, image), torch.randint(settings.classes, (batch,))
        names = [site.name for site in segue.select(self.original, settings.sites)]
        self.sites = names[:count]

    def by_hand(self, join: Join = student_alone, students: dict[str, nn.Module] | None = None) -> Trainee:
        """Put students in by plain assignment, fresh ones or copies of those given."""
        model = copy.deepcopy(self.original).requires_grad_(False)
        for site in segue.select(model, self.sites):
            parent, _, leaf = site.name.rpartition(".")
            teacher = model.get_submodule(site.name)
            student = copy.deepcopy(students[site.name]) if students else segue.students.Reinit()(teacher, site)
            setattr(model.get_submodule(parent), leaf, join(teacher, student.requires_grad_(True)))
        return Trainee(model, self.batch)

    def running(self, plan: segue.Plan, kind: type[Trainee] = Trainee, total: int = 10**6) -> Trainee:
        """Begin a handover; with a constant schedule it stays in the phase that is measured."""
        model = copy.deepcopy(self.original).train()
        return kind(model, self.batch, segue.replace_(model, plan, total_steps=total))

    def takeover(self) -> Trainee:
        return self.running(segue.methods.student_only(sites=self.sites))

    def finalized(self) -> Trainee:
        handover = self.takeover().handover
        assert handover is not None
        model = handover.finalize_().requires_grad_(False)
        for name in self.sites:
            model.get_submodule(name).requires_grad_(True)
        return Trainee(model, self.batch)

    def blend(self) -> Trainee:
        return self.running(segue.methods.dcr(sites=self.sites, schedule=Constant(alpha=0.5)))

    def guided(self) -> Trainee:
        guidance = segue.losses.FeatureGuidance(schedule=Constant(alpha=1.0))
        return self.running(segue.methods.dcr_dfg(sites=self.sites, schedule=Constant(alpha=0.5), guidance=guidance))

    def theseus(self) -> Trainee:
        return self.running(segue.methods.theseus(sites=self.sites, schedule=Constant(alpha=0.5)))

    def gumbel(self) -> Trainee:
        return self.running(segue.methods.theseus_gumbel(sites=self.sites, schedule=Constant(alpha=0.5)))

    def distillation(self) -> Trainee:
        return self.running(segue.methods.distillation(sites=self.sites))

    def all(self) -> dict[str, Trainee]:
        """Build everything that needs no other package, in the order of the tables."""
        half = Constant(alpha=0.5)
        return {
            BY_HAND: self.by_hand(),
            AGAIN: self.by_hand(),
            VIEW: self.running(segue.methods.dcr(sites=self.sites, schedule=half), ViewedTrainee),
            TAKEOVER: self.takeover(),
            FINALIZED: self.finalized(),
            BLEND_BY_HAND: self.by_hand(BlendByHand),
            BLEND: self.blend(),
            GUIDED: self.guided(),
            THESEUS: self.theseus(),
            GUMBEL: self.gumbel(),
            KL: self.distillation(),
        }

    def teachers_alone(self) -> tuple[Step, int]:
        """Return a call of all teachers on what they see in the model, and the bytes of their outputs."""
        calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        output_bytes = 0

        def note(teacher: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            nonlocal output_bytes
            calls.append((teacher, args, kwargs))
            output_bytes += output.nbytes

        model = copy.deepcopy(self.original).eval()
        hooks = [model.get_submodule(name).register_forward_hook(note, with_kwargs=True) for name in self.sites]
        with torch.no_grad():
            model(self.batch[0])
        for hook in hooks:
            hook.remove()

        @torch.no_grad()
        def run() -> None:
            for teacher, args, kwargs in calls:
                teacher(*args, **kwargs)

        return run, output_bytes

    def teacher_bytes(self) -> int:
        """Return the bytes of the replaced modules' parameters."""
        return sum(p.nbytes for name in self.sites for p in self.original.get_submodule(name).parameters())


def warm_up(trainees: Iterable[Trainee]) -> None:
    """Take a first step: on it a seam compares its two sides, whatever the plan says, and AdamW makes its states."""
    for trainee in trainees:
        trainee.step()
