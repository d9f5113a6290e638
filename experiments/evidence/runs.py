"""The evidence: eight arms in five settings, further arms in two of them, each tuned alike; and the paper's one rate for all.

Command:  segue tune experiments/evidence -o setting=digits --trials 6 --steps-share 0.25 --out runs/evidence/digits_tune
          segue grid experiments/evidence -o setting=digits --tuned runs/evidence/digits_tune/tuned.json --out DIR
Runtime:  at most five minutes of one thread a run; README.md has the order, the number and the time of each.
Expected: docs/results.md; results/ holds what its tables are made of.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from experiments.evidence import arms as known_arms
from experiments.evidence.arms import Arm
from experiments.evidence.settings import SETTINGS, Case, Setting
from segue.errors import ConfigError, nearest
from segue.lab import tune
from segue.lab.config import Run, changed
from segue.lab.presets import early_evaluations
from segue.lab.variants import Variant

REFERENCE = known_arms.REFERENCE
ONE_RATE = "one rate for all"
T = TypeVar("T")


def runs(
    setting: str,
    arms: str = "eight",
    seeds: int = 5,
    steps: int | None = None,
    only: str = "",
    group: str | int = "",  # the command line reads 100 as a number
    one_rate: str = "",
    alone: bool = False,
    data: str = "",
) -> list[Run]:
    """Return arms x groups x seeds of a setting; the seed varies slowest, so that an interrupted grid has complete seeds.

    `only` selects arms by their names, `group` groups by a part of theirs. `one_rate` is a tuned.json whose rate for
    student-only training all arms get (the paper's protocol). `alone` notes that nothing else runs on the machine. `data` is
    SEGUE_DATA.
    """
    if data:
        os.environ["SEGUE_DATA"] = data
    found = _named("setting", SETTINGS, setting)()
    arms_of = _named("arms", known_arms.ARMS, arms)
    known = {arm.name: arm for arm in arms_of(found.cases[0].start)}
    for name in only.split(",") if only else ():
        _named("arm", known, name, "only")
    made = [
        _run(found, case, arm, seed, steps, alone)
        for seed in range(seeds)
        for case in found.cases
        if str(group) in case.group
        for arm in arms_of(case.start)
        if not only or arm.name in only.split(",")
    ]
    made = [run if _measured(run, arms) and not one_rate else replace(run, diagnostics=()) for run in made]
    return _at_one_rate(made, Path(one_rate)) if one_rate else made


def _run(setting: Setting, case: Case, arm: Arm, seed: int, steps: int | None, alone: bool) -> Run:
    preset = setting.preset
    variant = Variant(arm.name, arm.label, arm.plan)
    run = preset.run(variant, seed=seed, data_fraction=case.data_fraction, group=case.group, **case.plan)
    longer = case.start.outside if arm.name in known_arms.OUTSIDE else 1.0
    total, evaluations = (round(longer * count) for count in (steps or run.recipe.steps or 0, preset.evaluations))
    early = early_evaluations(total, evaluations)  # dense where work to a target is decided
    recipe = replace(run.recipe, lr=arm.lr, steps=total)
    return replace(run, recipe=recipe, evaluations=evaluations if setting.evenly else early, alone=alone)


def _measured(run: Run, arms: str) -> bool:
    """Whether diagnostics, which take longer than training, are of use: a claim is about the variances of these methods."""
    return run.method == "theseus_gumbel" if arms == "further" else not any(phase.local for phase in run.plan.phases)


def _at_one_rate(runs: list[Run], tuned: Path) -> list[Run]:
    """Return runs of the paper's protocol: the rate of student-only training in every phase, all other settings as they are."""
    rates = {change.group: change.settings for change in tune.read(tuned) if change.method == REFERENCE}
    found = []
    for run in runs:
        for path, value in rates[run.group].items():
            run = changed(run, path, value)
        phases = tuple(replace(phase, lr=None, weight_decay=None) for phase in run.plan.phases)
        group = ONE_RATE if run.group == "all" else f"{run.group}, {ONE_RATE}"
        found.append(replace(run, plan=replace(run.plan, phases=phases), group=group))
    return found


def _named(what: str, known: dict[str, T], name: str, option: str = "") -> T:
    if name not in known:
        hint = f"give -o {option or what}={next(iter(known))}."
        raise ConfigError(f"there is no {what} {name!r}.", nearest(name, list(known)), hint)
    return known[name]
