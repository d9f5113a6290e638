"""Saved runs that also measured what Table 1 of the paper is about, made up from formulas."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from segue import methods
from segue.lab.config import to_dict
from segue.reporting.records import Point, Result
from tests.lab.report import saved_runs

RANDOM = {"theseus": 1.0, "theseus_gumbel": 0.25, "gumbel_dfg": 0.3}  # gates, and the share of p (1 - p) that each has
ALONE, TEACHER_PASS, TEACHER = 900.0, 300, 10  # operations: a step of students, a full teacher, one replaced module
PLANS = {name: plan for name, plan in methods.ALL.items() if name in saved_runs.LABELS}


def grid(names: list[str] | None = None, seeds: int = 3, **settings: Any) -> list[Result]:
    """Make up runs of the paper's methods that measured everything."""
    settings.setdefault("groups", ["100 %"])
    return [measured(one) for one in saved_runs.grid(methods=names, seeds=seeds, **settings)]


def measured(result: Result) -> Result:
    """Add variances, bounds and costs to a run, as its method would have them."""
    info, train = result.run_info, result.train_info
    config = info.config | ({"plan": to_dict(PLANS[info.method](sites="blocks.*.attn"))} if info.method in PLANS else {})
    noise = random.Random(f"measured {info.method} {info.seed}")
    points = [_measured(point, info.method, train.sites, noise) for point in train.points]
    cost = cost_of(info.method, len(train.sites), train.total_steps)
    return replace(result, run_info=replace(info, config=config), train_info=replace(train, points=points, cost=cost))


def with_points(result: Result, *given: dict[str, Any]) -> Result:
    """Give the points of a run these values; further points are dropped."""
    points = [replace(point, **values) for point, values in zip(result.train_info.points, given, strict=False)]
    return replace(result, train_info=replace(result.train_info, points=points))


def with_cost(result: Result, cost: dict[str, Any]) -> Result:
    return replace(result, train_info=replace(result.train_info, cost=cost))


def cost_of(method: str, sites: int = 12, steps: int = 1000) -> dict[str, Any]:
    """Make up the saved cost of a method: a fifth of the steps blends, distillation asks a full teacher at every step."""
    blend = 0 if method in ("student_only", "distillation") else steps // 5
    always = float(TEACHER_PASS) if method == "distillation" else 0.0
    phases = [_phase("after takeover", steps - blend, ALONE + always, 4000, 50_000 + (70_000 if always else 0))]
    if blend:
        phases.insert(0, _phase("blend", blend, ALONE + TEACHER * sites, 4200, 56_000))
    return {
        "phases": phases,
        "student_only": _phase("student-only", steps, ALONE, 4000, 50_000),
        "distillation": _phase("full-teacher distillation", steps, ALONE + TEACHER_PASS, 4000, 120_000),
        "teachers": {f"blocks.{i}.attn": TEACHER for i in range(sites)},
        "teacher_pass": TEACHER_PASS,
        "steps": steps,
    }


def _phase(name: str, steps: int, flops: float, saved_bytes: int, parameters: int) -> dict[str, Any]:
    return {"name": name, "steps": steps, "flops": flops, "saved_bytes": saved_bytes, "parameters": parameters}


def _measured(point: Point, method: str, sites: list[str], noise: random.Random) -> Point:
    if point.alpha <= 0 and method not in ("student_only", "distillation"):
        return point
    p = 1 - point.alpha
    size = {site: 10.0 ** (-1 - 3 * i / len(sites)) * (0.8 + 0.4 * noise.random()) for i, site in enumerate(sites)}
    told = {site: RANDOM.get(method, 0.0) * p * (1 - p) * value for site, value in size.items()}
    drawn = {site: value * (0.9 + 0.3 * noise.random()) for site, value in told.items()}
    return replace(
        point,
        gate_variance=drawn,
        gate_variance_error={site: 0.05 * value for site, value in drawn.items()},
        predicted_variance=told,
        data_variance={site: 0.2 * p * value for site, value in size.items()},
        curvature_bias={site: -0.02 * value for site, value in drawn.items()} if method in RANDOM else {},
        curvature_bound={site: 0.5 * value for site, value in drawn.items()} if method in RANDOM else {},
        path_rise={site: 0.3 * value for site, value in size.items()} if point.alpha > 0 else {},
        path_bound={site: 2.0 * value * (1 + i) for i, (site, value) in enumerate(size.items())} if point.alpha > 0 else {},
    )
