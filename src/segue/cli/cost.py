"""`segue cost`: what plans cost on a model, as a table in the terminal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from segue.core.blending import tensors
from segue.diagnostics.costs import HEADINGS, Cost, cost
from segue.errors import ConfigError, SegueError
from segue.lab import variants
from segue.lab.model_names import build, example, kinds
from segue.plan import Plan
from segue.reporting.formatting import flops, memory

LARGE = 10**9  # a model of more parameters is counted without memory for them


def show(
    console: Console,
    name: str,
    plan: str,
    sites: str | None,
    *,
    batch: int,
    tokens: int,
    steps: int,
    picture: Path | None = None,
) -> None:
    """Count and print: one plan phase by phase, several side by side."""
    outline = build(name)
    plans = _plans(plan, sites, outline, name)
    if picture is not None and len(plans) > 1:
        raise ConfigError(f"a picture of {len(plans)} plans was asked for.", "It shows one.", "name one method.")
    large = sum(parameter.numel() for parameter in outline.parameters()) > LARGE
    model = outline if large else build(name, "cpu")
    inputs = example(model, batch, tokens)
    found: dict[str, Cost] = {}
    for label, one in plans.items():
        with console.status(f"counting {escape(label)}"):
            found[label] = _counted(name, model, one, inputs, steps)
    title = f"{escape(name)}, {batch} examples a step, {steps:,} steps"
    console.print(_by_phase(found[next(iter(found))], title) if len(found) == 1 else _side_by_side(found, title))
    if len(found) == 1:
        for sentence in found[next(iter(found))].notes:
            console.print(escape(sentence), soft_wrap=True)
    if large:
        console.print("Counted without weights in memory: bytes are those of plain attention, fused kernels keep fewer.")
    if picture is not None:
        console.print(str(next(iter(found.values())).draw(picture)), soft_wrap=True)


def _counted(name: str, model: nn.Module, plan: Plan, inputs: Any, steps: int) -> Cost:
    try:
        return cost(model, plan, inputs, total_steps=steps)
    except SegueError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        shapes = [tuple(x.shape) for x in tensors(inputs)]
        raise ConfigError(
            f"{name} was to be called with zeros of the shapes {shapes}.",
            f"It raised {type(error).__name__}: {str(error).splitlines()[0]}",
            "give it a batch of your own in Python: segue.cost(model, plan, batch).",
        ) from error


def _plans(plan: str, sites: str | None, outline: nn.Module, name: str) -> dict[str, Plan]:
    """Read what one types as plans: a file, a method, or several."""
    path = Path(plan)
    if path.suffix == ".json":
        if not path.is_file():
            raise ConfigError(f"the plan {plan} was to be read.", "There is no such file.", "json.dump(plan.to_dict(), file).")
        try:
            saved = Plan.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, AttributeError) as error:
            if isinstance(error, SegueError):
                raise
            raise ConfigError(
                f"the plan {plan} was to be read.", f"It is no plan: {error}", "write it with json.dump(plan.to_dict(), file)."
            ) from None
        return {path.stem: saved if sites is None else replace(saved, sites=sites)}
    found = variants.find([plan])
    if sites is None:
        patterns = ", ".join(repr(kind.pattern) for kind in kinds(outline) if "*" in kind.pattern)
        raise ConfigError(
            f"the cost of {plan!r} on {name} was asked for.",
            "Nothing says which modules are replaced.",
            f"give --sites PATTERN; what repeats in this model: {patterns}.",
        )
    return {variant.label: variant.plan(sites=sites) for variant in found}


def _by_phase(found: Cost, title: str) -> Table:
    table = Table(*HEADINGS, title=title)
    for phase in found.rows:
        table.add_row(*found.cells(phase), end_section=phase == found.whole)
    return table


def _side_by_side(found: dict[str, Cost], title: str) -> Table:
    headings = (
        "method",
        "operations per step",
        "/ student-only",
        "/ full teacher",
        "dearest phase",
        "bytes kept",
        "parameters",
    )
    table = Table(*headings, title=f"{title}; means over the whole run")
    for label, one in found.items():
        whole = one.whole
        dearest = max(one.phases, key=lambda phase: phase.flops)
        table.add_row(
            escape(label),
            flops(whole.flops),
            f"{one.to_student_only:.3f}",
            f"{one.to_distillation:.3f}",
            f"{dearest.name}: {dearest.flops / one.student_only.flops:.3f}",
            memory(whole.saved_bytes),
            f"{whole.parameters:,}",
        )
    return table
