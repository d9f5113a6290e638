"""The result of planning: a plan that every entry takes, what it is based on, and how sure it is."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from segue.border import PositiveFloat, checked
from segue.core import files
from segue.errors import PlanError, nearest
from segue.losses import FeatureGuidance, LogitDistillation
from segue.plan import Plan, encode
from segue.planning.candidates import KEEP, Option
from segue.planning.costs import CostTable
from segue.planning.pacing import adaptive, order_of, staggered
from segue.planning.prediction import Prediction
from segue.reporting.records import write_json
from segue.sites import Pattern, Site
from segue.students import StudentFactory
from segue.students.per_site import PerSite

FORMAT = 1
LOSSES: dict[str, Any] = {"guidance": FeatureGuidance(), "distill": LogitDistillation()}  # of a plan, if not given


@dataclass(frozen=True)
class Choice:
    """One choice of options with what is predicted of it, before training."""

    subset: tuple[Option, ...]
    kl: float
    interval: tuple[float, float]  # holds the KL of nine such subsets in ten
    differing: float  # fraction of predictions whose first choice changes
    saved: dict[str, float]  # fractions of the complete model, by metric
    gap: float = 0.0  # how much better another choice could be, by the same prediction

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as plain data."""
        return {**dataclasses.asdict(self), "subset": [list(option) for option in self.subset]}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What `plan_replacement` finds; `plan` is for `replace_`, `fit`, `convert` and Trainer."""

    plan: Plan
    choice: Choice
    metric: str  # what the budget saves, the first one if it is several
    frontier: tuple[Choice, ...]
    sites: tuple[Site, ...]
    students: dict[str, StudentFactory]  # by candidate
    settings: dict[str, Any]  # of the plan, besides sites, student and schedule
    errors: dict[Option, float]  # relative error of each student after the local fit
    matrix: Tensor  # H, in the order of prediction.options
    prediction: Prediction
    differing: Prediction
    costs: CostTable
    refused: dict[Option, str]
    notes: tuple[str, ...]
    spent: dict[str, float]  # tokens or examples, operations and seconds of the planning itself

    @property
    def order(self) -> list[Option]:
        """The chosen options, those with the least damage in context first."""
        return order_of(self.prediction, self.choice.subset)

    @property
    def staggered(self) -> Plan:
        """The plan in which each site has its turn and its ramp, whatever `plan` does."""
        return self.plan_of(self.choice.subset)

    def operators(self) -> dict[str, str]:
        """Return the candidate of every site, or 'keep'."""
        chosen = dict(self.choice.subset)
        return {site.name: chosen.get(site.name, KEEP) for site in self.sites}

    def plan_of(self, subset: Sequence[Option]) -> Plan:
        """Return the plan of another choice, such as one of the frontier."""
        return made_plan(self.sites, self.students, self.prediction, self.errors, self.costs, subset, self.settings)

    @checked
    def adaptive_plan(self, kl: PositiveFloat | None = None) -> Plan:
        """Return the plan with an adaptive schedule: the error at each site is what a KL allows, by default the plan's."""
        within = self.choice.kl if kl is None else kl
        schedule = adaptive(self.prediction, self.order, self.errors, max(within, 1e-6))
        plan = self.staggered
        return dataclasses.replace(plan, schedule=schedule, guidance=plan.guidance or FeatureGuidance())

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        options = [list(option) for option in self.prediction.options]
        return {
            "format": FORMAT,
            "plan": self.plan.to_dict(),
            "staggered": self.staggered.to_dict(),
            "operators": self.operators(),
            "order": [site for site, _ in self.order],
            "choice": self.choice.to_dict(),
            "frontier": [point.to_dict() for point in self.frontier],
            "options": options,
            "errors": [self.errors[option] for option in self.prediction.options],
            "alone": [self.prediction.of([option]) for option in self.prediction.options],
            "quadratic": self.matrix.tolist(),
            "interactions": self.prediction.pairs.tolist(),
            "held_out_r2": {"kl": self.prediction.r2, "differing": self.differing.r2},
            "subsets": self.prediction.measured,
            "costs": self.costs.to_dict(),
            "refused": [{"site": site, "candidate": name, "reason": why} for (site, name), why in self.refused.items()],
            "candidates": {name: encode(student) for name, student in self.students.items()},
            "notes": list(self.notes),
            "spent": self.spent,
        }

    @checked
    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write plan.json, for `segue convert --plan`, and planned.json with everything else; return the path of the plan.

        Where the plan has no turns and ramps of its own, staggered.json is the one that has.
        """
        place = Path(folder)
        with files.writing(place):
            place.mkdir(parents=True, exist_ok=True)
            write_json(self.to_dict(), place / "planned.json")
            (place / "staggered.json").unlink(missing_ok=True)  # of an earlier budget
            if self.plan != self.staggered:
                write_json(self.staggered.to_dict(), place / "staggered.json")
            return write_json(self.plan.to_dict(), place / "plan.json")

    @checked
    def draw(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Draw the frontier, the sites x candidates and the interactions of pairs; needs matplotlib."""
        from segue.planning.figures import draw

        with files.writing(Path(folder)):
            return draw(self, Path(folder))

    def __str__(self) -> str:
        """Format the plan as Markdown tables and notes."""
        from segue.planning.report import markdown

        return markdown(self)


def made_plan(
    sites: Sequence[Site],
    students: Mapping[str, StudentFactory],
    prediction: Prediction,
    errors: Mapping[Option, float],
    costs: CostTable,
    subset: Sequence[Option],
    settings: Mapping[str, Any],
) -> Plan:
    """Make the plan of a choice: an operator for each site, in order, at the pace of its error, taught by the original."""
    if not subset:
        raise PlanError(
            "a plan must replace at least one site.",
            "All sites keep their original.",
            "allow more damage, or ask for a saving.",
        )
    chosen = dict(subset)
    places = {site.name: site for site in sites}
    patterns: list[Pattern] = [places[name].pattern for name in places if name in chosen]
    trains = any(costs.students[option]["parameters"] for option in subset)  # else only what is around the sites can adapt
    own = {"train": "students" if trains else "all", **settings}
    if "phases" not in settings:
        own = {"schedule": staggered(order_of(prediction, subset), errors), **own}
    student = PerSite(students={name: students[chosen[name]] for name in places if name in chosen})
    return Plan(sites=tuple(patterns), student=student, **{**LOSSES, **own})


def require_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings that a plan does not have, or that planning itself decides."""
    known = [each.name for each in dataclasses.fields(Plan) if each.name not in ("sites", "student")]
    for name in settings:
        if name not in known:
            raise PlanError(
                f"settings={{{name!r}: ...}} is no further setting of a plan.",
                "Planning decides it." if name in ("sites", "student") else nearest(name, known),
                f"known are {', '.join(known)}. Nothing was changed.",
            )
    Plan(sites="*", **{**LOSSES, **settings})
