"""Saved runs as the lab writes them, made up from formulas: fast, repeatable, and shaped like the real ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from segue.reporting import records as results
from segue.reporting.records import Point, Result, RunInfo, TrainInfo

LABELS = {
    "student_only": "Student only",
    "distillation": "KL distillation",
    "theseus": "Theseus",
    "theseus_gumbel": "Theseus-Gumbel",
    "gumbel_dfg": "Gumbel + DFG",
    "dcr": "DCR",
    "dcr_dfg": "DCR + DFG",
}
SPEED = {  # how fast each method recovers, in share of the training
    "student_only": 0.30,
    "distillation": 0.22,
    "theseus": 0.26,
    "theseus_gumbel": 0.24,
    "gumbel_dfg": 0.16,
    "dcr": 0.18,
    "dcr_dfg": 0.12,
}
COST = {"distillation": 1.6, "student_only": 1.0}
GROUPS = {"100 %": 0.0, "20 %": 0.04, "5 %": 0.15}  # and the accuracy that less data costs
TEACHER = 0.91


def run(
    *,
    method: str = "dcr",
    label: str | None = None,
    group: str = "100 %",
    seed: int = 0,
    sites: int = 12,
    evaluations: int = 26,
    epochs: int = 50,
    experiment: str = "small",
    config: dict[str, Any] | None = None,
) -> Result:
    """Make up one run: students that approach the teacher, each method at its own speed."""
    noise = random.Random(f"{method} {group} {seed}")
    shared = random.Random(f"{group} {seed}")  # the same batches for every method
    per_epoch, names = 20, [f"blocks.{i}.attn" for i in range(sites)]
    total = epochs * per_epoch
    ceiling = TEACHER - 0.012 - GROUPS.get(group, 0.0) + shared.gauss(0, 0.004) + noise.gauss(0, 0.002)
    speed = SPEED.get(method, 0.2) * (1 + noise.gauss(0, 0.05))
    ceiling -= 0.05 * SPEED.get(method, 0.2)
    cost = COST.get(method, 1.25)
    points = []
    for index in range(evaluations):
        progress = index / max(1, evaluations - 1)
        alpha = 0.0 if method in ("student_only", "distillation") else _aggr20(progress)
        gained = 1 - math.exp(-progress / speed)
        students = max(0.01, 0.01 + (ceiling - 0.01) * gained + (noise.gauss(0, 0.004) if 0 < progress < 1 else 0))
        cosine = {
            name: min(
                0.999, (0.98 - 0.02 * i) * (1 - math.exp(-progress / (speed * (0.5 + i / sites)))) + noise.gauss(0, 0.004)
            )
            for i, name in enumerate(names)
        }
        share = 1 - alpha
        points.append(
            Point(
                step=round(progress * total),
                epoch=progress * epochs,
                seconds=progress * 3900 * cost * (1 + 0.01 * seed),
                flops=progress * 2.4e15 * cost,
                alpha=alpha,
                loss=4.6 * math.exp(-2 * gained) + noise.random() * 0.02 if index else None,
                blend={"accuracy": alpha * TEACHER + share * students, "loss": 1.0},
                students={"accuracy": students, "loss": 2.0},
                cosine=cosine,
                relative_error={name: 1 - value for name, value in cosine.items()},
                gradient_norm={
                    name: (0.02 + share) * math.exp(-3 * gained) * (1 + i / sites) * (0.9 + 0.2 * noise.random())
                    for i, name in enumerate(names)
                }
                if index
                else {},
                drift_blend={name: share * (1.02 - gained) * (i + 1) / sites for i, name in enumerate(names)},
                drift_students={name: (1.02 - gained) * (i + 1) / sites for i, name in enumerate(names)},
            )
        )
    final = points[-1].students["accuracy"]
    info = RunInfo(
        experiment=experiment,
        name=f"{method}-{group.replace(' ', '')}-seed{seed}",
        method=method,
        label=label or LABELS.get(method, method),
        group=group,
        seed=seed,
        config=config
        or {"method": method, "optimizer": {"name": "AdamW", "learning_rate": 5e-4}, "seed": seed, "epochs": epochs},
        config_hash=f"{noise.getrandbits(64):016x}",
    )
    train = TrainInfo(
        score="accuracy",
        total_steps=total,
        steps_per_epoch=per_epoch,
        sites=names,
        teacher={"accuracy": TEACHER - 0.002},
        teacher_eval={"accuracy": TEACHER},
        points=points,
        final={"accuracy": final + noise.gauss(0, 0.001)},
        seconds=points[-1].seconds,
        flops=points[-1].flops,
        step_flops={"students": 2.0e12, "teachers_forward": 4.0e11, "full_teacher": 8.0e11},
        peak_memory=int(1.4e9 * cost),
    )
    meta = {"versions": {"segue": "0.1.0", "torch": "2.13.0"}, "hardware": "a made-up CPU", "commit": "0" * 40}
    return Result(run_info=info, train_info=train, meta_info=meta)


def with_own_alphas(result: Result, lag: float = 0.5) -> Result:
    """Let every site hand over a little later than the one before it."""
    sites = result.train_info.sites
    points = [
        replace(p, alphas={s: min(1.0, p.alpha * (1 + lag * i)) for i, s in enumerate(sites)}) for p in result.train_info.points
    ]
    return replace(result, train_info=replace(result.train_info, points=points))


def grid(methods: list[str] | None = None, groups: list[str] | None = None, seeds: int = 3, **settings: Any) -> list[Result]:
    """Make up methods x groups x seeds."""
    return [
        run(method=method, group=group, seed=seed, **settings)
        for group in groups or list(GROUPS)
        for method in methods or list(LABELS)
        for seed in range(seeds)
    ]


def save(runs: list[Result], folder: Path) -> Path:
    """Write runs as the lab does, each in a folder of its own."""
    for number, one in enumerate(runs):
        results.write(one, folder / f"{number:03}-{one.run_info.method[:40]}-seed{one.run_info.seed}")
    return folder


def scored(values: list[float | None], *, teacher: float | None = 0.8, final: float | None = None, **settings: Any) -> Result:
    """Make up a run whose students score these values, one per evaluation and epoch; None is a score that is not finite."""
    made = run(evaluations=len(values), epochs=max(1, len(values) - 1), **settings)
    points = [
        Point(
            **{
                **vars(point),
                "epoch": float(i),
                "step": i * 20,
                "seconds": 10.0 * i,
                "flops": 1e9 * i,
                "students": {"accuracy": value},
            }
        )
        for i, (point, value) in enumerate(zip(made.train_info.points, values, strict=True))
    ]
    train = TrainInfo(
        **{
            **vars(made.train_info),
            "points": points,
            "teacher": {"accuracy": teacher},
            "teacher_eval": {"accuracy": teacher},
            "final": {"accuracy": values[-1] if final is None else final},
        }
    )
    return Result(run_info=made.run_info, train_info=train, meta_info=made.meta_info)


def changed(result: Result, **train: Any) -> Result:
    """Give a run other values of its train_info."""
    return replace(result, train_info=replace(result.train_info, **train))


def with_points(result: Result, change: Callable[[int, Point], Point]) -> Result:
    """Change every point of a run."""
    return changed(result, points=[change(index, point) for index, point in enumerate(result.train_info.points)])


def _aggr20(progress: float) -> float:
    if progress < 0.1:
        return 1 - 7 * progress
    return max(0.0, 0.3 - 3 * (progress - 0.1))
