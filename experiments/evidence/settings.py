"""The settings: data, model, teacher and length of the runs, and where the searches of the arms begin.

Data is named relative to the folder SEGUE_DATA: fashion-mnist/ (IDX files), cifar-100-python/, minilm/ and stories15m/ (Hugging
Face folders), sst2_train.tsv, sst2_dev.tsv, text.safetensors (experiments/stories15m/sample.py writes it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.evidence.arms import Start
from experiments.evidence.stories import HeldOutStories
from experiments.stories15m.runs import AFTER_FIT, KL, RATES, WINDOW
from segue.data.augment import CropFlip
from segue.data.digits import Digits
from segue.data.torchvision import Torchvision
from segue.data.tsv import Tsv
from segue.diagnostics.recorder import VARIANCE
from segue.lab import presets
from segue.lab.config import Stage, Teacher
from segue.lab.models import SentenceClassifier, SmallViT
from segue.lab.presets import Preset
from segue.lab.tasks import ImageTask, SentenceTask
from segue.phases import Rates
from segue.students import LinearAttention, WindowedLinear
from segue.training.recipe import Recipe

CIFAR100_TEACHER = "experiments/evidence/teachers/cifar100.safetensors"  # train_teachers.py writes it


@dataclass(frozen=True, kw_only=True)
class Case:
    """One group of runs of a setting, within which arms are compared."""

    group: str = "all"
    start: Start
    data_fraction: float = 1.0
    plan: dict[str, Any] = field(default_factory=dict)  # what all its arms have: the student, the sites


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything but the arms and the seeds."""

    preset: Preset
    cases: tuple[Case, ...]
    evenly: bool = False  # evaluate at equal distances, not half of the times in the first quarter of a run


def digits() -> Setting:
    """Return setting 1: 320 images, a twelve-block ViT, attention re-initialised, as experiments/recipes."""
    task = ImageTask(source=Digits(), model=SmallViT(depth=12))
    preset = Preset(
        name="digits",
        task=task,
        teacher=Teacher(task=task, stages=(Stage(recipe=Recipe(steps=500, lr=3e-3, warmup=0.1)),), batch=64),
        recipe=Recipe(steps=500, warmup=0.05),
        batch=64,
        evaluations=20,
        diagnostics=(VARIANCE,),
    )
    start = Start(lr=4e-3, fit=8e-3, after=5e-4, after_few=1e-3)
    return Setting(preset=preset, cases=(Case(start=start, data_fraction=0.248),))  # of 1,297: 320 images


def fashion() -> Setting:
    """Return setting 2: Fashion-MNIST, a twelve-block ViT, attention re-initialised, all of the data and 2 % of it."""
    start = Start(lr=4e-3, fit=1.6e-2, after=5e-4, after_few=1e-3)
    cases = (
        Case(group="100 % of the data", start=start),
        Case(group="2 % of the data", start=start, data_fraction=0.02),
    )
    return Setting(preset=replace(presets.small("fashion-mnist"), name="fashion", evaluations=32, diagnostics=()), cases=cases)


def cifar100_model(weights: str | None = None) -> SmallViT:
    """Return a twelve-block ViT of a million parameters: 64 tokens from two convolutions."""
    return SmallViT(patch=4, width=80, depth=12, heads=5, convolutional=True, weights=weights)


def cifar100_task(weights: str | None = None) -> ImageTask:
    """Return the paper's data with the paper's loss, and crops and mirrored images."""
    source = Torchvision(name="CIFAR100", folder=".")  # the folder cifar-100-python is in SEGUE_DATA itself
    return ImageTask(source=source, model=cifar100_model(weights), augment=CropFlip(), eval_examples=1000)


def cifar100() -> Setting:
    """Return setting 3: the paper's stage 2 in miniature, its settings kept except the model and the length of the run."""
    task = cifar100_task(CIFAR100_TEACHER)
    preset = Preset(
        name="cifar100",
        task=task,
        teacher=Teacher(task=task, stages=()),
        recipe=Recipe(steps=160),  # the paper: 50 epochs, 19,531 steps
        batch=128,
        evaluations=10,
        diagnostics=(),
    )
    start = Start(lr=2e-3, fit=8e-3, after=5e-4, after_few=1e-3)
    cases = (
        Case(group="100 % of the data", start=start),
        Case(group="10 % of the data", start=start, data_fraction=0.1),
    )
    return Setting(preset=preset, cases=cases, evenly=True)


def minilm_task() -> SentenceTask:
    """Return SST-2 on MiniLM, sentences cut at 48 tokens; a batch has sentences of similar length."""
    source = Tsv(train="sst2_train.tsv", test="sst2_dev.tsv")
    model = SentenceClassifier(name="minilm")
    return SentenceTask(source=source, model=model, longest=48, eval_examples=256, group_by_length=True)


def minilm_teacher() -> Teacher:
    """Return how MiniLM is fine-tuned to 89 % or more: twice over the data."""
    recipe = Recipe(steps=4200, lr=1e-4, warmup=0.1, weight_decay=0.01)
    return Teacher(task=minilm_task(), stages=(Stage(recipe=recipe),), batch=32)


def minilm() -> Setting:
    """Return setting 4: MiniLM on SST-2, attention re-initialised, and linear attention with copied projections."""
    preset = Preset(
        name="minilm",
        task=minilm_task(),
        teacher=minilm_teacher(),
        recipe=Recipe(steps=600, warmup=0.05),
        batch=8,
        evaluations=10,
        diagnostics=(),
    )
    linear = {"sites": "**.attention.self", "student": LinearAttention(feature_map="hedgehog")}
    rates = Rates(new=3e-3, copied=1e-4)
    updates = {"split": 8, "reuse": 2}  # sixteen: a batch has eight sentences
    cases = (
        Case(group="Re-initialised attention", start=Start(lr=3e-4, fit=2e-3, after=3e-4, updates=updates)),
        Case(
            group="Linear attention",
            start=Start(lr=rates, fit=replace(rates, new=6e-3), after=rates, updates=updates),
            plan=linear,
        ),
    )
    return Setting(preset=preset, cases=cases)


def stories() -> Setting:
    """Return setting 5: all attention of stories15M by a window of 32 with linear attention, on texts of its own."""
    task = HeldOutStories(model="stories15m", text="text.safetensors")
    preset = Preset(
        name="stories",
        task=task,
        teacher=Teacher(task=task, stages=()),
        recipe=Recipe(steps=100, warmup=0.05, weight_decay=0.0),
        batch=4,
        evaluations=13,
        diagnostics=(),
    )
    start = Start(  # a long local fit, as that of `segue convert`; sixteen updates: a batch has four texts
        lr=RATES,
        fit=RATES,
        after=AFTER_FIT,
        after_few=RATES,  # a quarter of the updates: what follows has more to learn
        updates={"split": 4, "reuse": 4},
        distill=KL,
        labels=0.0,
        outside=1.6,
    )
    return Setting(preset=preset, cases=(Case(start=start, plan={"student": WindowedLinear(**WINDOW)}),), evenly=True)


SETTINGS: dict[str, Callable[[], Setting]] = {
    "digits": digits,
    "fashion": fashion,
    "cifar100": cifar100,
    "minilm": minilm,
    "stories": stories,
}
WITH_FURTHER_ARMS = ("digits", "fashion")
