"""`segue cost`: the cost of plans on a model, as a table in the terminal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from torch import nn

from segue.cli.terminal import print_json, say
from segue.convert import parse_student
from segue.core import files
from segue.core.blending import tensors
from segue.diagnostics.costs import HEADINGS, Cost, cost
from segue.errors import ConfigError, SegueError
from segue.lab import variants
from segue.lab.models import build, example, kinds
from segue.plan import Plan
from segue.reporting.formatting import flops, memory

LARGE = 10**9  # parameters, above which a model gets no memory, and its students are built without a proof


def show(
    console: Console,
    name: str,
    plan: str,
    sites: str | None,
    student: str | None = None,
    *,
    batch: int,
    tokens: int,
    steps: int,
    picture: Path | None = None,
    as_json: bool = False,
) -> None:
    """Count and print: one plan phase by phase, several in one table."""
    outline = build(name)
    plans = _plans(plan, sites, outline, name)
    if student is not None:
        plans = {label: replace(one, student=parse_student.student(student)) for label, one in plans.items()}
    if picture is not None and len(plans) > 1:
        raise ConfigError("a picture shows one plan.", f"{plan!r} stands for {len(plans)}.", "name one method.")
    large = sum(parameter.numel() for parameter in outline.parameters()) > LARGE
    model = outline if large else build(name, "cpu")
    inputs = example(model, batch, tokens)
    found: dict[str, Cost] = {}
    for place, (label, one) in enumerate(plans.items(), 1):
        with console.status(Text(f"counting {label}, {place} of {len(plans)}")):
            found[label] = _counted(name, model, one, inputs, steps)
    drawn = None if picture is None else next(iter(found.values())).draw(picture)
    if as_json:
        print_json({label: one.to_dict() for label, one in found.items()})
        return
    title = f"{name if student is None else f'{name} to {student}'}, {batch} examples a step, {steps:,} steps"
    console.print(_by_phase(found[next(iter(found))], title) if len(found) == 1 else _side_by_side(found, title))
    if len(found) == 1:
        for sentence in found[next(iter(found))].notes:
            console.print(sentence, soft_wrap=True)
    if drawn is not None:
        say(str(drawn))
    say("These numbers are counted, not measured. Next: segue convert --help, or segue run --help.")


def _counted(name: str, model: nn.Module, plan: Plan, inputs: Any, steps: int) -> Cost:
    try:
        return cost(model, plan, inputs, total_steps=steps)
    except SegueError as error:
        if (cause := error.__cause__) is None:
            raise
        shapes = [tuple(x.shape) for x in tensors(inputs)]  # the model's own error
        raise ConfigError(
            f"{name} cannot be called with zeros of the shapes {shapes}.",
            f"It raises {type(cause).__name__}: {str(cause).splitlines()[0]}",
            "give it a batch of your own in Python: segue.cost(model, plan, batch).",
        ) from cause


def _plans(plan: str, sites: str | None, outline: nn.Module, name: str) -> dict[str, Plan]:
    """Return the plans of a file, of a method, or of several methods."""
    path = Path(plan)
    if path.suffix == ".json":
        if not path.is_file():
            raise ConfigError(
                f"the plan {plan} cannot be read.", "There is no such file.", "write it with json.dump(plan.to_dict(), file)."
            )
        try:
            saved = Plan.from_dict(json.loads(files.content(path)))
        except (ValueError, TypeError, AttributeError, LookupError, OSError, RecursionError) as error:
            if isinstance(error, SegueError):
                raise
            raise ConfigError(
                f"the plan {plan} cannot be read.",
                f"It is not a plan: {error}",
                "write it with json.dump(plan.to_dict(), file).",
            ) from None
        return {path.stem: saved if sites is None else replace(saved, sites=sites)}
    made, own = parse_student.method(plan) if "(" in plan else (None, {})
    found = variants.find([plan]) if made is None else []
    if sites is None:
        patterns = ", ".join(repr(kind.pattern) for kind in kinds(outline) if "*" in kind.pattern)
        raise ConfigError(
            f"the method {plan!r} needs sites.",
            f"Patterns of repeated modules of {name}: {patterns}.",
            "give --sites PATTERN.",
        )
    return {variant.label: variant.plan(sites=sites) for variant in found} if made is None else {plan: made(sites=sites, **own)}


def _by_phase(found: Cost, title: str) -> Table:
    table = Table(Column(HEADINGS[0], no_wrap=True), *HEADINGS[1:], title=title)
    for phase in found.rows:
        table.add_row(*found.cells(phase), end_section=phase == found.total)
    return table


def _side_by_side(found: dict[str, Cost], title: str) -> Table:
    headings = (
        "method",
        "operations per step",
        "/ student-only",
        "/ full teacher",
        "most expensive phase",
        "bytes kept",
        "parameters",
    )
    table = Table(Column(headings[0], no_wrap=True), *headings[1:], title=f"{title}; means over the complete run")
    for label, one in found.items():
        total = one.total
        highest = max(one.phases, key=lambda phase: phase.flops)
        table.add_row(
            label,
            flops(total.flops),
            f"{one.to_student_only:.3f}",
            f"{one.to_distillation:.3f}",
            f"{highest.name}: {highest.flops / one.student_only.flops:.3f}",
            memory(total.saved_bytes),
            f"{total.parameters:,}",
        )
    return table
