"""`segue plan`: which sites of a model to replace, by what, in what order; tables in the terminal, files in a folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from segue.cli.arguments import name_values
from segue.cli.terminal import command_line, print_json, say
from segue.convert.data import load, require_positions
from segue.convert.options import Conversion, PlanSettings
from segue.convert.parse_student import student
from segue.convert.pretrained import Base, open_base
from segue.convert.recipes import by_default
from segue.data.augment import normalise
from segue.data.files import optional
from segue.data.hub import ImageFolder
from segue.errors import ConfigError, nearest
from segue.planning import Frontier, Planned, Quality, Saving, plan_replacement
from segue.planning.costs import METRICS
from segue.planning.report import sentences, tables
from segue.planning.solving import Budget


def show(settings: PlanSettings, out: Path, console: Console, *, as_json: bool) -> None:
    """Plan, print the tables or the JSON, and write plan.json, planned.json and the figures."""
    budget = budget_of(settings)
    candidates = [student(text) for text in settings.candidates]
    base = None if settings.model.startswith("timm:") else open_base(settings.model, download=settings.download)
    model, batches, example = _timm(settings) if base is None else _loaded(settings, base)
    found = plan_replacement(
        model,
        batches,
        candidates,
        budget,
        sites=list(settings.sites),
        fit_steps=settings.fit_steps,
        subsets=settings.subsets,
        recall=settings.recall,
        augmented=settings.augmented,
        cost_batch=example,
        folder=out / "measurements",
        seed=settings.seed,
    )
    if base is not None:
        found = dataclasses.replace(found, plan=by_default(found.plan, base))
    path = found.save(out)
    drawn = found.draw(out)
    if as_json:
        print_json(found.to_dict())
        return
    _print(found, console)
    if base is None and not settings.download:
        console.print(f"{settings.model} has random weights here: allow its pretrained ones with --download.", soft_wrap=True)
    console.print(f"\n{path}\n{', '.join(each.name for each in drawn)} are beside it.", soft_wrap=True)
    if base is None:
        say(f"Next: {command_line('cost', settings.model, path)}")
    else:
        words = (settings.model, "--plan", path, "--data", settings.data, "--out", "DIR")
        say(f"Next: {command_line('convert', *words)}")


def budget_of(settings: PlanSettings) -> Budget:
    """Return the budget that the options say; two are refused."""
    given = {name: value for name in ("save", "kl", "differing") if (value := getattr(settings, name)) is not None}
    if len(given) > 1:
        raise ConfigError(
            "a plan has one budget.", f"Given are --{' and --'.join(given)}.", "give one of them, or none for the frontier."
        )
    if settings.save is None:
        return Quality(**given, saves=settings.saves) if given else Frontier(saves=settings.saves)
    wanted = name_values([part.strip() for part in settings.save.split(",")])
    for name in wanted:
        if name not in METRICS:
            raise ConfigError(f"{name!r} cannot be saved.", nearest(name, list(METRICS)), f"known are {', '.join(METRICS)}.")
    return Saving(**wanted)


def _loaded(settings: PlanSettings, base: Base) -> tuple[nn.Module, Iterable[Any], Any]:
    """Return the model, batches, and a batch whose costs are measured."""
    names = ("model", "data", "batch", "tokens", "seed", "text", "label", "download")
    known = {name: getattr(settings, name) for name in names}
    data = load(base, Conversion(sites=settings.sites[0], student=settings.candidates[0], steps=1, **known))
    batches = (_inputs(batch) for batch in islice(data.train, settings.batches))
    if base.reads_images:
        first = next(batches)
        example = {name: x[: settings.cost_batch] for name, x in first.items()}
        return base.model, chain([first], batches), example
    tokens = settings.cost_tokens or settings.tokens
    require_positions(base, tokens)
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(base.model.config.vocab_size)  # type: ignore[arg-type, union-attr]
    example = {"input_ids": torch.randint(vocabulary, (settings.cost_batch, tokens), generator=generator)}
    return base.model, batches, example


def _inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in batch.items() if name not in ("labels", "targets")}


def _timm(settings: PlanSettings) -> tuple[nn.Module, Iterable[Any], Any]:
    """Build a model of timm, and images in its size."""
    name = settings.model.removeprefix("timm:")
    timm = optional("timm", "timm", f"the model {name!r} cannot be built.")
    if not timm.is_model(name):
        raise ConfigError(f"timm has no model {name!r}.", nearest(name, timm.list_models()), "timm.list_models() lists them.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = timm.create_model(name, pretrained=settings.download).eval()
    known = model.pretrained_cfg
    pixels = ImageFolder(folder=settings.data, size=known["input_size"][-1])().train.inputs
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(settings.seed))
    whole = torch.split(order[: max(1, len(order) // settings.batch) * settings.batch], settings.batch)

    def made(chosen: Tensor) -> Tensor:
        return normalise(pixels[chosen], tuple(known["mean"]), tuple(known["std"]))

    return model, map(made, whole[: settings.batches]), made(order[: settings.cost_batch])


def _print(found: Planned, console: Console) -> None:
    for title, headings, rows in tables(found):
        table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
        for place, heading in enumerate(headings):
            table.add_column(heading, no_wrap=place == 0, justify="left" if place < 2 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for sentence in sentences(found):
        console.print(f"- {sentence}", soft_wrap=True, highlight=False)
