"""Operators in place of attention: which recover the teacher, by which method, under equal budgets.

Command:  segue grid experiments/operators --out runs/operators --workers 2     (digits; -o folder=PATH for Fashion-MNIST)
          segue grid experiments/operators --out runs/operators_minilm --workers 2 -o part=minilm -o model=FOLDER
          segue grid experiments/operators --out runs/layers --workers 2 -o part=layers -o model=FOLDER
Runtime:  on two shared cores 105, 18 and 12 runs of half a minute to two minutes each; with -o seeds=2 an hour for the first.
Expected: (two seeds) Nystrom and Performer recover 99 % of the teacher's accuracy, Linformer 94 %, Fourier 90 %; the method
          hardly matters, and no best method is significantly above the next. MiniLM: 96 to 98 %. Six layers to three: 95 %.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from segue.errors import ConfigError
from segue.lab import presets, variants
from segue.lab.config import Run, Stage
from segue.lab.models import SmallViT
from segue.lab.presets import Preset
from segue.sites import Span
from segue.students import (
    Fourier,
    LinearAttention,
    Linformer,
    Nystrom,
    OneLayer,
    Performer,
    SlidingWindow,
    StudentFactory,
    WindowedLinear,
)
from segue.training.recipe import Recipe

ATTENTION = "**.attention.self"  # of BERT and its kind: an operator reads the complete module
METHODS = ("student_only", "distillation", "dcr", "dcr_dfg", "lolcats")


def operators(tokens: int) -> dict[str, StudentFactory]:
    """Return every operator, sized to a third of so many tokens where it has a size."""
    third = tokens // 3
    return {
        "Linear attention": LinearAttention(feature_map="elu"),
        "Performer": Performer(features=64),
        "Linformer": Linformer(rank=third, tokens=tokens),
        "Nystrom": Nystrom(landmarks=third),
        "Sliding window": SlidingWindow(window=third // 2, sinks=1),
        "Windowed linear": WindowedLinear(window=third // 2, sinks=0, far=None),  # as docs/lab-log-2026-11.md has it
        "Fourier": Fourier(),
    }


def runs(
    part: Literal["vit", "minilm", "layers"] = "vit",
    folder: str | None = None,
    model: str | None = None,
    train: str = "data/sst2_train.tsv",
    test: str = "data/sst2_dev.tsv",
    seeds: int = 3,
    lr: float = 2e-3,
    methods: tuple[str, ...] | None = None,
) -> list[Run]:
    """Return operators x methods x seeds: of a small ViT (digits, or Fashion-MNIST from a folder), or of MiniLM."""
    parts: dict[str, Callable[[], tuple[Preset, tuple[str, ...], dict[str, dict[str, object]]]]] = {
        "vit": lambda: _vit(folder, lr),
        "minilm": lambda: _minilm(_given(model), train, test),
        "layers": lambda: _layers(_given(model), train, test),
    }
    preset, usual, groups = parts[part]()
    return [
        preset.run(variant, seed=seed, group=group, **settings)
        for seed in range(seeds)
        for group, settings in groups.items()
        for variant in variants.find(methods or usual)
    ]


def _vit(folder: str | None, lr: float) -> tuple[Preset, tuple[str, ...], dict[str, dict[str, object]]]:
    if folder is None:
        preset, tokens = presets.demo(steps=200), 16
        preset = replace(preset, recipe=replace(preset.recipe, lr=lr))
    else:
        preset, tokens = presets.small(folder, steps=200, lr=lr), 49
        task = replace(preset.task, model=SmallViT(patch=4, width=48, depth=4))
        stage = Stage(recipe=Recipe(steps=1000, lr=2e-3, warmup=0.1))
        preset = replace(preset, task=task, teacher=replace(preset.teacher, task=task, stages=(stage,)), batch=64)
    preset = replace(preset, name="operators", evaluations=4, diagnostics=())
    return preset, METHODS, {name: {"student": student} for name, student in operators(tokens).items()}


def _minilm(model: str, train: str, test: str) -> tuple[Preset, tuple[str, ...], dict[str, dict[str, object]]]:
    preset = replace(presets.minilm(model, train, test), name="operators_minilm", evaluations=4, diagnostics=())
    groups: dict[str, dict[str, object]] = {
        "Linear attention": {"sites": ATTENTION, "student": LinearAttention(feature_map="hedgehog")},
        "Windowed linear": {"sites": ATTENTION, "student": WindowedLinear(window=4)},
    }
    return preset, ("student_only", "distillation", "dcr_dfg"), groups


def _layers(model: str, train: str, test: str) -> tuple[Preset, tuple[str, ...], dict[str, dict[str, object]]]:
    preset = replace(presets.minilm(model, train, test), name="layers", evaluations=4, diagnostics=())
    settings: dict[str, object] = {"sites": Span("encoder.layer", every=2), "student": OneLayer()}
    return preset, ("student_only", "theseus", "dcr", "dcr_dfg"), {"6 layers to 3": settings}


def _given(model: str | None) -> str:
    if model is None:
        raise ConfigError("this part needs the option `model`.", "It is the folder of MiniLM.", "give -o model=FOLDER.")
    return model
