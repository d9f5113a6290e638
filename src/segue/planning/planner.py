"""plan_replacement(): which sites, which operator, in what order and how slowly, from a few batches without labels."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segue.border import NotNegative, PositiveFloat, PositiveInt, Seed, checked
from segue.checkpoint.lock import locked
from segue.core import randomness, surgery
from segue.core.blending import call_arguments, tensors
from segue.core.tensor_files import fingerprint
from segue.diagnostics.counting import flops
from segue.plan import encode
from segue.planning import damage, signals
from segue.planning.candidates import Candidates, Option, candidates_on, named
from segue.planning.costs import ROUNDS, CostTable, measure_costs
from segue.planning.fitting import fit_candidates, fit_recipe, step_operations
from segue.planning.journal import Journal
from segue.planning.planned import Choice, Planned, made_plan, require_settings
from segue.planning.prediction import Prediction, predicted
from segue.planning.signals import Signal
from segue.planning.solving import (
    COUNTED,
    FRONTIER_SECONDS,
    Budget,
    Frontier,
    Problem,
    Saving,
    Solution,
    metric_of,
    most_possible,
    require_possible,
    solve,
)
from segue.reporting.formatting import counted
from segue.sites import Selector, select
from segue.students import StudentFactory
from segue.training.progress import Progress
from segue.training.recipe import Recipe

CURVED = 2  # batches of a signal on which interactions are measured
ENOUGH = 256  # predictions to measure damage on; a batch of a language model has more, one of a classifier fewer


@checked
def plan_replacement(
    model: nn.Module,
    batches: Iterable[Any],
    candidates: Mapping[str, StudentFactory] | Sequence[StudentFactory] | StudentFactory,
    budget: Budget | None = None,
    *,
    sites: Selector,
    fit_steps: PositiveInt = 32,
    lr: PositiveFloat = 1e-3,
    closed_form: bool = False,
    subsets: PositiveInt = 48,
    measure_on: PositiveInt | None = None,
    recall: NotNegative = 0.0,
    augmented: NotNegative = 0.0,
    cost_batch: Any = None,
    folder: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    seed: Seed = 0,
    progress: str | None = "planning",
) -> Planned:
    """Choose which sites to replace, by which candidate, in what order and how slowly; the model is not changed.

    Keeping the original is always possible. Without a budget the frontier is found.

        budget = segue.planning.Saving(flops=0.2)
        linear = segue.students.LinearAttention()
        planned = segue.plan_replacement(model, batches, linear, budget, sites="blocks.*.attn")
        handover = segue.replace_(model, planned.plan, total_steps=1000)

    Args:
        model: The original model.
        batches: A few, without labels, as the model is called; read again.
        candidates: Students to choose from, with names or without.
        budget: `Quality(...)` or `Saving(...)` of `segue.planning`.
        sites: Where a replacement is possible.
        fit_steps: Local updates of each candidate before it is measured.
        lr: The rate of these updates.
        closed_form: Calibrate students first, where the tokens are enough for it.
        subsets: Sets of sites that are really replaced, to correct the prediction.
        measure_on: Batches, the first ones, on which damage is measured; students are fitted on the others, if there are any.
            By default as many as have 256 predictions, at least two; half of the batches where they are too few.
        recall: The weight of retrieval beside the batches, for causal models.
        augmented: The weight of augmented images beside the batches.
        cost_batch: The batch whose costs count; by default the first.
        folder: Where an interrupted plan resumes.
        settings: Further settings of the `Plan`.
        seed: Of everything that draws.
        progress: The name of the progress bar; None shows none.
    """
    begun = time.monotonic()
    factories, given = named(candidates), dict(settings or {})
    require_settings(given)
    budget = Frontier() if budget is None else budget
    recipe = fit_recipe(fit_steps, lr)
    place = None if folder is None else Path(folder)
    with ExitStack() as stack:
        stack.enter_context(randomness.kept())
        if place is not None:
            stack.enter_context(locked(place))
        surgery.refuse_wrapped(model)
        surgery.refuse_running(model)
        held, fitted = split(model, batches, measure_on, None if closed_form else fit_steps)
        measured = [signals.on_batches(held)]
        measured += [signals.recall(model, weight=recall, seed=seed)] if recall else []
        measured += [signals.augmented(held, weight=augmented, seed=seed)] if augmented else []
        shape = cost_batch if cost_batch is not None else held[0]
        damage.require_logits(model, held)
        tried = stack.enter_context(candidates_on(model, sites, factories, held[0], seed))
        known = [recipe, closed_form, subsets, len(held), seed, [s.weight for s in measured]]
        journal = Journal(place, _key([*held, *fitted], shape, tried, factories, known))
        name = f"{progress}, resumed" if progress is not None and journal.resumed else progress
        work = _Work(tried, journal, stack.enter_context(closing(Progress(name, _amount(recipe, measured)))))
        costs = work.costs(shape)
        require_possible(budget, costs)  # before the work of minutes begins
        errors = fit_candidates(tried, fitted, recipe, journal, closed_form=closed_form, shown=work.shown)
        work.done += fit_steps
        matrix, notes = work.curvature(measured, seed)
        prediction, differing = work.predictions(measured, matrix, subsets, seed)
        notes += work.few_predictions() + _undecided(budget, costs)
        spent = {**work.spent(fitted, shape, measured, fit_steps), "seconds": time.monotonic() - begun}
        refused = tried.refused
    problem, other = Problem(prediction, costs), Problem(differing, costs)
    found, metric = solve(budget, problem, other), metric_of(budget, costs)
    places = tuple(select(model, sites))
    return Planned(
        plan=made_plan(places, factories, prediction, errors, costs, found.subset, given),
        choice=_choice(found, prediction, differing, costs),
        metric=metric,
        frontier=tuple(_frontier(problem, differing, metric)),
        sites=places,
        students=factories,
        settings=given,
        errors=errors,
        matrix=matrix,
        prediction=prediction,
        differing=differing,
        costs=costs,
        refused=refused,
        notes=tuple(notes),
        spent=spent,
    )


class _Work:
    """The measurements of a plan, each of which is in the journal before the next begins."""

    def __init__(self, candidates: Candidates, journal: Journal, shown: Progress) -> None:
        self.candidates, self.journal, self.shown = candidates, journal, shown
        self.done = 0
        self.drawn: list[tuple[Option, ...]] = []
        self.predicted = 0  # predictions that damage is measured on

    def _moved(self, text: str) -> None:
        self.done += 1
        self.shown(min(self.done, self.shown.total), text)

    def costs(self, batch: Any) -> CostTable:
        """Measure the costs, once: a resumed plan keeps those of its first process."""
        if "costs" not in self.journal:
            self.journal.write("costs", measure_costs(self.candidates, batch).to_dict())
        self._moved("costs")
        return CostTable.from_dict(self.journal["costs"])

    def curvature(self, measured: Sequence[Signal], seed: int) -> tuple[Tensor, list[str]]:
        """Return H over all signals, by forward-mode products or, where there are none, by single and pair swaps."""
        total = torch.zeros(len(self.candidates.options), len(self.candidates.options), dtype=torch.float64)
        for signal in measured:
            batches = list(zip(signal.batches, signal.masks, strict=True))[:CURVED]
            for i, (batch, mask) in enumerate(batches):
                name = f"curvature/{signal.name}/{i}"
                if name not in self.journal:
                    try:
                        found: Any = damage.curvature(self.candidates, batch, mask, seed).tolist()
                    except torch.OutOfMemoryError:
                        raise
                    except (NotImplementedError, RuntimeError) as error:
                        found = str(error).strip().splitlines()[0]
                    self.journal.write(name, found)
                if isinstance(self.journal[name], str):
                    return self._by_swaps(measured), [
                        "Interactions are measured by single and pair swaps: an operator of the model has no forward-mode "
                        f"derivative ({self.journal[name]})."
                    ]
                total += signal.weight / len(batches) * torch.tensor(self.journal[name], dtype=torch.float64)
                self._moved("curvature")
        return total, []

    def _by_swaps(self, measured: Sequence[Signal]) -> Tensor:
        """Measure all single and pair swaps on the first batch of each signal."""
        options = self.candidates.options
        swaps = damage.swaps(options)
        total: dict[tuple[Option, ...], float] = dict.fromkeys(swaps, 0.0)
        for signal in measured:
            for swap, found in zip(swaps, self._divergences(f"swaps/{signal.name}", signal, 0, swaps), strict=True):
                total[swap] += signal.weight * found[0] / found[2]
        return damage.from_swaps(options, total)

    def _divergences(
        self, name: str, signal: Signal, place: int, subsets: Sequence[Sequence[Option]]
    ) -> list[tuple[float, float, int]]:
        if name not in self.journal:
            batch, mask = signal.batches[place], signal.masks[place]
            self.journal.write(name, damage.divergences(self.candidates, batch, mask, subsets))
        found: list[tuple[float, float, int]] = self.journal[name]
        return found

    def predictions(self, measured: Sequence[Signal], matrix: Tensor, count: int, seed: int) -> tuple[Prediction, Prediction]:
        """Measure each option alone and random subsets, and predict all others: the divergence, and differing choices.

        Options alone are measured on all batches, every subset on two of them in turn, so that what subsets say about
        interactions and errors holds for more than one choice of inputs.
        """
        options = self.candidates.options
        self.drawn = damage.random_subsets(options, count, seed)
        total = torch.zeros(len(options) + len(self.drawn), 2, dtype=torch.float64)
        whole = sum(signal.weight for signal in measured)
        for signal in measured:
            sums = torch.zeros(len(total), 3, dtype=torch.float64)
            for i in range(len(signal.batches)):
                rows, shown = self._turns(len(signal.batches), i)
                found = self._divergences(f"damage/{signal.name}/{i}", signal, i, shown)
                sums[rows] += torch.tensor(found, dtype=torch.float64)
                self._moved("damage")
            self.predicted += int(sums[0, 2])
            total += signal.weight * sums[:, :2] / sums[:, 2:] / torch.tensor([1.0, whole])
        kl, differing = (column.split([len(options), len(self.drawn)]) for column in total.T)
        unit = float(differing[0].sum() / kl[0].sum()) if float(kl[0].sum()) > 0 else 0.0
        return (
            predicted(options, kl[0].tolist(), matrix, self.drawn, kl[1].tolist()),
            predicted(options, differing[0].tolist(), unit * matrix, self.drawn, differing[1].tolist()),
        )

    def _turns(self, batches: int, place: int) -> tuple[list[int], list[tuple[Option, ...]]]:
        """Return the rows, and the subsets, that are measured on a batch: all options alone, and random subsets in turn."""
        alone: list[tuple[Option, ...]] = [(option,) for option in self.candidates.options]
        here = [k for k in range(len(self.drawn)) if place in {2 * k % batches, (2 * k + 1) % batches}]
        return [*range(len(alone)), *(len(alone) + k for k in here)], [*alone, *(self.drawn[k] for k in here)]

    def few_predictions(self) -> list[str]:
        """Say where damage is measured on so few predictions that interactions are hardly more than their noise."""
        if self.predicted >= ENOUGH:
            return []
        return [
            f"Damage is measured on {counted(self.predicted, 'prediction')}: more than the interval says depends on which. "
            f"Give larger batches, or more to measure on, for at least {ENOUGH}."
        ]

    def spent(self, fitted: Sequence[Any], shape: Any, measured: Sequence[Signal], fit_steps: int) -> dict[str, float]:
        """Count what the planning takes: inputs that pass the model, and operations.

        One pass of each kind is counted, on the first batch to fit on; others take as many operations for each input.
        """
        candidates, batch = self.candidates, fitted[0]
        plain = self._forward(batch, ())
        extra = {
            name: (self._forward(batch, [(site, name) for site in candidates.at(name)]) - plain) / len(candidates.at(name))
            for name in candidates.names
        }
        curved = any(isinstance(self.journal.get(f"curvature/{signal.name}/0"), list) for signal in measured)
        product = self._product(batch) if curved else 0.0
        known = _inputs(batch)
        seen = fit_steps * sum(map(_inputs, fitted)) / len(fitted)
        operations = seen * step_operations(candidates, batch) / known
        for signal in measured:
            for i, each in enumerate(signal.batches):
                subsets = self._shown(signal, i)
                products = len(candidates.options) * isinstance(self.journal.get(f"curvature/{signal.name}/{i}"), list)
                passes = [plain + sum(extra[name] for _, name in subset) for subset in subsets] + [product] * products
                seen += len(passes) * _inputs(each)
                operations += sum(passes) * _inputs(each) / known
        first = _inputs(measured[0].batches[0])
        trials = 1 + len(measured[0].batches) + len(candidates.names)  # whether the forward is random, what fits
        seen += trials * first + 2 * (ROUNDS + 2) * _inputs(shape)
        operations += trials * first * plain / known + self.journal["costs"].get("operations", 0.0)
        return {"inputs": seen, "flops": operations}

    def _forward(self, batch: Any, subset: Sequence[Option]) -> int:
        args, kwargs = call_arguments(batch)
        with self.candidates.showing(subset) as model:
            return flops(lambda: model(*args, **kwargs))

    def _product(self, batch: Any) -> float:
        """Count a forward-mode product, at the first and at the last site: what lies behind a site takes part in it."""
        ends = (self.candidates.options[0], self.candidates.options[-1])
        return sum(flops(partial(damage.product_of, self.candidates, end, batch)) for end in ends) / 2

    def _shown(self, signal: Signal, place: int) -> list[tuple[Option, ...]]:
        """Return the subsets that were shown on a batch."""
        found: list[tuple[Option, ...]] = []
        if f"damage/{signal.name}/{place}" in self.journal:
            found += [(), *self._turns(len(signal.batches), place)[1]]
        if place == 0 and f"swaps/{signal.name}" in self.journal:
            found += [(), *damage.swaps(self.candidates.options)]
        return found


def split(
    model: nn.Module, batches: Iterable[Any], measure_on: int | None, fit_steps: int | None
) -> tuple[list[Any], list[Any]]:
    """Return the batches to measure on and those to fit on; no more are read than are looked at, all for the closed form."""
    stream = iter(batches)
    every = list(signals.on_batches(islice(stream, 1)).batches)
    wanted = measure_on or max(2, math.ceil(ENOUGH / damage.predictions(model, every[0])))
    every += islice(stream, None if fit_steps is None else wanted - 1 + fit_steps)
    count = wanted if measure_on or len(every) > wanted else max(2, len(every) // 2)
    return every[:count], every[count:] or every


def _inputs(batch: Any) -> int:
    """Count tokens, or examples where there are none."""
    found = list(tensors(batch))
    ids = next((x for x in found if not x.is_floating_point()), None)
    return ids.numel() if ids is not None else len(found[0])


def _amount(recipe: Recipe, measured: Sequence[Signal]) -> int:
    return recipe.total_steps(None) + 1 + sum(len(signal.batches) + min(CURVED, len(signal.batches)) for signal in measured)


def _key(held: Sequence[Any], shape: Any, candidates: Candidates, factories: Mapping[str, Any], known: Sequence[Any]) -> str:
    """Hash everything that the measurements depend on."""
    data = fingerprint({str(i): x for i, x in enumerate(tensors((list(held), shape)))})
    weights = fingerprint({**candidates.handover.original_backbone()})
    described = [repr(each) if isinstance(each, Recipe) else each for each in known]
    parts = [
        data,
        weights,
        candidates.handover.teacher_hashes,
        {n: encode(f) for n, f in factories.items()},
        candidates.options,
    ]
    return hashlib.sha256(json.dumps([*parts, *described], sort_keys=True).encode()).hexdigest()


def _undecided(budget: Budget, costs: CostTable) -> list[str]:
    """Say what was chosen where the budget leaves it open: how much is saved, and of what."""
    if isinstance(budget, Saving):
        return []
    metric, found = metric_of(budget, costs), []
    if isinstance(budget, Frontier):
        share = f"{budget.choose:.0%} of what can be saved of {metric}"
        found.append(f"No budget was given: the plan is the least damage for {share}. Other rows need one, such as a KL.")
    if budget.saves is None and metric != COUNTED[0]:
        found.append(f"No candidate saves {COUNTED[0]} on inputs of {costs.shape}: the plan saves {metric}.")
    return found


def _choice(found: Solution, prediction: Prediction, differing: Prediction, costs: CostTable) -> Choice:
    saved = {metric: sum(costs.saved(option, metric) for option in found.subset) for metric in costs.total}
    middle, between = prediction.of(found.subset), prediction.interval(found.subset)
    return Choice(found.subset, middle, between, min(1.0, differing.of(found.subset)), saved, found.gap)


def _frontier(problem: Problem, differing: Prediction, metric: str) -> Iterable[Choice]:
    """Yield the least damage at as many levels of saving as there are sites."""
    most, levels = most_possible(problem.costs, metric), len(problem.sites)
    seen: set[tuple[Option, ...]] = set()
    for level in range(1, levels + 1):
        wanted = {metric: most * level / levels * (1 - 1e-9)}
        found = problem.least_damage(wanted, FRONTIER_SECONDS / levels) if most > 0 else None
        if found is not None and found.subset and found.subset not in seen:
            seen.add(found.subset)
            yield _choice(found, problem.prediction, differing, problem.costs)
