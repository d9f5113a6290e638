"""Presets: the same experiment in minutes, in an hour or two, and as in the paper."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from segue.border import Count, Fraction, NotNegative, PositiveFloat, PositiveInt, Seed, checked
from segue.data.augment import CropFlip
from segue.data.digits import Digits
from segue.data.hub import HubDataset
from segue.data.torchvision import Idx, Torchvision
from segue.data.tsv import Tsv
from segue.diagnostics.recorder import VARIANCE
from segue.lab.config import Run, Stage, Teacher
from segue.lab.models import SentenceClassifier, SmallViT, Timm
from segue.lab.tasks import ImageTask, SentenceTask, Task
from segue.lab.variants import Variant
from segue.training.recipe import Recipe


@checked
@dataclass(frozen=True, kw_only=True)
class Preset:
    """Everything about an experiment but the method and the seed."""

    name: str
    task: Task
    teacher: Teacher
    recipe: Recipe
    batch: PositiveInt
    evaluations: Count
    data_fraction: Fraction = 1.0
    diagnostics: tuple[str, ...] = (VARIANCE,)

    @checked
    def run(
        self, variant: Variant, *, seed: Seed = 0, data_fraction: Fraction | None = None, group: str = "all", **settings: Any
    ) -> Run:
        """Return the configuration of one method with one seed; further settings go to its plan."""
        total = self.recipe.steps
        return Run(
            experiment=self.name,
            method=variant.name,
            label=variant.label,
            group=group,
            plan=variant.plan(sites=settings.pop("sites", self.task.sites), seed=seed, **settings),
            task=self.task,
            teacher=self.teacher,
            recipe=replace(self.recipe, seed=seed),
            batch=self.batch,
            data_fraction=self.data_fraction if data_fraction is None else data_fraction,
            evaluations=self.evaluations if total is None else early_evaluations(total, self.evaluations),
            diagnostics=self.diagnostics,
            seed=seed,
        )


def early_evaluations(total: int, evaluations: int) -> tuple[int, ...]:
    """Spread evaluations over a run, half of them in its first quarter, where the teachers leave.

    >>> early_evaluations(100, 8)
    (6, 12, 19, 25, 44, 62, 81, 100)
    """
    early = evaluations // 2
    first = {max(1, round(total * i / (4 * early))) for i in range(1, early + 1)}
    rest = evaluations - early
    return tuple(sorted(first | {round(total * (0.25 + 0.75 * i / rest)) for i in range(1, rest + 1)}))


@checked
def demo(
    *, steps: PositiveInt = 320, teacher_steps: PositiveInt = 500, depth: PositiveInt = 6, data_fraction: Fraction = 0.25
) -> Preset:
    """Digits, embedded: a six-block ViT, whose attention is replaced with a quarter of the data; minutes on two cores."""
    task = ImageTask(source=Digits(), model=SmallViT(depth=depth))
    stage = Stage(recipe=Recipe(steps=teacher_steps, lr=3e-3, warmup=0.1))
    return Preset(
        name="demo",
        task=task,
        teacher=Teacher(task=task, stages=(stage,), batch=64),
        recipe=Recipe(steps=steps, lr=3e-3, warmup=0.05),
        batch=64,
        evaluations=16,
        data_fraction=data_fraction,
    )


@checked
def small(
    folder: str | Path,
    *,
    steps: PositiveInt = 320,
    lr: PositiveFloat = 4e-3,
    weight_decay: NotNegative = 0.05,
    hold_out: Count = 0,
) -> Preset:
    """Fashion-MNIST from IDX files: a twelve-block ViT; an hour or two on two cores."""
    source = Idx(folder=str(folder))
    model = SmallViT(patch=7, width=64, depth=12)
    task = ImageTask(source=source, model=model, eval_examples=1000, hold_out=hold_out)
    stage = Stage(recipe=Recipe(steps=1500, lr=1e-3, warmup=0.1))
    return Preset(
        name="small",
        task=task,
        teacher=Teacher(task=task, stages=(stage,)),
        recipe=Recipe(steps=steps, lr=lr, weight_decay=weight_decay, warmup=0.05),
        batch=128,
        evaluations=10,
    )


@checked
def paper(
    *, folder: str | Path | None = None, download: bool = False, precision: Literal["float32", "bf16", "fp16"] = "bf16"
) -> Preset:
    """The paper: timm's ViT-Small/16, pretrained on ImageNet, on CIFAR-100; bf16 on a GPU.

    The data comes from torchvision's folder if one is given, else from the Hugging Face hub.
    """
    source = (
        HubDataset(id="uoft-cs/cifar100", image="img", label="fine_label", download=download)
        if folder is None
        else Torchvision(name="CIFAR100", folder=str(folder), download=download)
    )
    task = ImageTask(
        source=source,
        model=Timm(name="vit_small_patch16_224"),
        size=224,
        mean=(0.5, 0.5, 0.5),  # as these weights were trained
        std=(0.5, 0.5, 0.5),
        augment=CropFlip(pad=28),  # CIFAR's usual 4 of 32 pixels, at 224
        eval_examples=10_000,
    )
    shared: dict[str, Any] = {"precision": precision}
    head = Recipe(epochs=6, lr=1e-3, final_lr=1e-6, warmup=2 / 6, **shared)
    everything = Recipe(epochs=6, lr=1e-4, **shared)
    return Preset(
        name="paper",
        task=task,
        teacher=Teacher(task=task, stages=(Stage(recipe=head, head_only=True), Stage(recipe=everything))),
        recipe=Recipe(epochs=50, **shared),
        batch=128,
        evaluations=50,
    )


@checked
def minilm(
    model: str | Path,
    train: str | Path,
    test: str | Path,
    *,
    steps: PositiveInt = 150,
    lr: PositiveFloat = 3e-4,
    hold_out: Count = 0,
) -> Preset:
    """SST-2 sentences: a pretrained MiniLM, fine-tuned, then all its attention replaced."""
    task = SentenceTask(
        source=Tsv(train=str(train), test=str(test)),
        model=SentenceClassifier(name=str(model)),
        longest=20,
        eval_examples=256,
    )
    stages = (Stage(recipe=Recipe(steps=400, lr=1e-4, warmup=0.1)),)
    return Preset(
        name="minilm",
        task=replace(task, hold_out=hold_out),  # the teacher has seen all of it, so that a search needs no other teacher
        teacher=Teacher(task=task, stages=stages, batch=32),
        recipe=Recipe(steps=steps, lr=lr, warmup=0.05),
        batch=16,
        evaluations=8,
    )
