"""Candidates: the students that may stand at each site, side by side on one handover of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from segue.core import surgery
from segue.core.building import build_students, try_students
from segue.core.handover import Handover, replace_
from segue.core.modes import View
from segue.core.views import isolated
from segue.errors import PlanError, SegueError, StudentError
from segue.losses import FeatureGuidance
from segue.plan import Plan
from segue.schedules import Constant
from segue.sites import Selector, Site, select
from segue.students import StudentFactory

KEEP = "keep"

Option: TypeAlias = tuple[str, str]  # the name of a site, and of a candidate there


class Candidates:
    """The students of all options, on one handover; any subset of them can be shown."""

    def __init__(self, handover: Handover, students: dict[Option, nn.Module], refused: dict[Option, str]) -> None:
        self.handover, self.students, self.refused = handover, students, refused
        self.options = list(students)
        self.sites = list(handover.seams)
        self.names = list(dict.fromkeys(name for _, name in students))
        self._known_calls: dict[Option, set[tuple[Any, ...]]] = {option: set() for option in students}

    @property
    def model(self) -> nn.Module:
        return self.handover.model

    def at(self, name: str) -> dict[str, nn.Module]:
        """Return the students of one candidate, by site."""
        return {site: student for (site, candidate), student in self.students.items() if candidate == name}

    def put(self, option: Option) -> None:
        """Let a student stand at its site."""
        seam = self.handover.seams[option[0]]
        seam.student, seam.known_calls = self.students[option], self._known_calls[option]

    @contextmanager
    def showing(self, subset: Iterable[Option]) -> Iterator[nn.Module]:
        """Show a model with these students, and the teachers elsewhere, in evaluation and without gradients."""
        chosen = dict(subset)
        with isolated(self.handover), torch.no_grad():
            for site, seam in self.handover.seams.items():
                if site in chosen:
                    self.put((site, chosen[site]))
                seam.configure(view=View.STUDENT if site in chosen else View.TEACHER)
            yield self.model


@contextmanager
def candidates_on(
    model: nn.Module, sites: Selector, factories: Mapping[str, StudentFactory], example: Any, seed: int
) -> Iterator[Candidates]:
    """Put the candidates next to their teachers while a block runs; afterwards the model is the original, bit for bit."""
    surgery.refuse_wrapped(model)
    surgery.refuse_running(model)
    found = select(model, sites)
    surgery.refuse_tied(model, found)
    plan = Plan(sites=sites, guidance=FeatureGuidance(), schedule=Constant(alpha=1.0), seed=seed)
    students: dict[Option, nn.Module] = {}
    refused: dict[Option, str] = {}
    for name, factory in factories.items():
        made, reasons = _made(model, dataclasses.replace(plan, student=factory), found, example)
        students |= {(site, name): student for site, student in made.items()}
        refused |= {(site, name): reason for site, reason in reasons.items()}
        if not made:
            site, reason = next(iter(reasons.items()))
            raise StudentError(
                f"the candidate {name!r} fits none of the {len(found)} sites.",
                f"At {site!r}: {reason}",
                "leave it out, or give sites that it can replace. Nothing was changed.",
            )
    first = {site: student for (site, _), student in reversed(students.items())}
    reached = [site for site in found if site.name in first]
    chosen = dataclasses.replace(
        plan, sites=tuple(site.pattern for site in reached), student=lambda _teacher, site: first[site.name]
    )
    handover = replace_(model, chosen, total_steps=1)
    try:
        yield Candidates(handover, students, refused)
    finally:
        handover.cancel_()


def _made(model: nn.Module, plan: Plan, sites: list[Site], example: Any) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Build a candidate at every site that it fits, tried on an example, and say why it does not fit the others."""
    made: dict[str, nn.Module] = {}
    reasons: dict[str, str] = {}
    for site in sites:
        try:
            made |= build_students(model, plan, [site])
        except SegueError as error:
            reasons[site.name] = _reason(error)
    fitting = [site for site in sites if site.name in made]
    try:
        if fitting:
            try_students(model, fitting, made, example)
        return made, reasons
    except StudentError:
        for site in fitting:  # one of them; each alone
            try:
                try_students(model, [site], {site.name: made[site.name]}, example)
            except StudentError as error:
                reasons[site.name] = _reason(error)
                del made[site.name]
        return made, reasons


def _reason(error: SegueError) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[:2])


def named(candidates: Mapping[str, StudentFactory] | Sequence[StudentFactory] | StudentFactory) -> dict[str, StudentFactory]:
    """Give every candidate a name: that of the mapping, or its repr."""
    if isinstance(candidates, Mapping):
        found = dict(candidates)
    else:
        given = list(candidates) if isinstance(candidates, Sequence) else [candidates]
        found = {_label(one): one for one in given}
        if len(found) < len(given):
            raise PlanError(
                f"{len(given)} candidates have {len(found)} names.",
                "Two of them are equal, or functions of one name.",
                "give a mapping from names to students. Nothing was changed.",
            )
    if not found or KEEP in found:
        raise PlanError(
            "the candidates must be at least one student, none of them called 'keep'.",
            f"Their names are {list(found)}.",
            "give for example [segue.students.LinearAttention()]; keeping the original is no candidate. Nothing was changed.",
        )
    return found


def _label(factory: Any) -> str:
    """Return the settings of a student that are not its defaults, as a user types them."""
    if not dataclasses.is_dataclass(factory) or isinstance(factory, type):
        return getattr(factory, "__qualname__", type(factory).__qualname__)
    settings = []
    for each in dataclasses.fields(factory):
        value = getattr(factory, each.name)
        default = each.default_factory() if each.default_factory is not dataclasses.MISSING else each.default
        if value != default:
            settings.append(f"{each.name}={value!r}")
    return f"{type(factory).__name__}({', '.join(settings)})" if settings else type(factory).__name__


def logits_of(output: Any) -> Tensor | None:
    """Return the logits of what a model returns: those of a Hugging Face output, or the tensor that a classifier returns."""
    found = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", output)
    return found if isinstance(found, Tensor) and found.is_floating_point() and found.dim() >= 2 else None
