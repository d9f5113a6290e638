"""The planners that are compared: each gives every subset a number, the damage that it predicts, before any training.

`segue plan` is `segue.plan_replacement` with its defaults. All others that look at students look at the same ones, after the
same local fit, and at the same batches. What a planner runs is run inside a counter of operations.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import segue
from experiments.planner.studies import Study, inputs, trained, training_flops
from segue.core.blending import captured_outputs, merge, padding_mask
from segue.core.modes import View
from segue.core.views import isolated
from segue.diagnostics.counting import flops
from segue.planning import Planned, damage, planner
from segue.planning.candidates import Candidates, candidates_on, named
from segue.planning.fitting import fit_candidates, fit_recipe, step_operations
from segue.planning.journal import FILE, Journal
from segue.planning.prediction import quadratic
from segue.students.attention.cache_copy import copy_caches
from segue.students.layers import layers_of
from segue.training.progress import Progress

GATE_STEPS, GATE_RATE = 60, 0.1
RANDOM = 100  # draws, whose mean is shown

Subset = tuple[int, ...]
T = TypeVar("T")


@dataclass
class Ranking:
    """The damage that a planner predicts for every subset, and what it took to predict it."""

    scores: dict[Subset, float]
    inputs: float = 0.0  # tokens, or images, that pass a model
    flops: float = 0.0


def subsets(count: int) -> list[Subset]:
    """Return all subsets but the empty one."""
    return [chosen for size in range(1, count + 1) for chosen in combinations(range(count), size)]


def defaults() -> dict[str, Any]:
    """Return the default settings of `plan_replacement`."""
    return {name: each.default for name, each in inspect.signature(segue.plan_replacement).parameters.items()}


def rank(study: Study, seed: int, folder: Path, *, cheap: bool = False, **settings: Any) -> dict[str, Ranking]:
    """Let every planner rank all subsets; `settings` of `plan_replacement` are those that are not its defaults.

    The folder keeps the plan's students, which all planners look at. Cheap planners are those that measure nothing besides.
    """
    every = study.planning_batches(seed)
    planned = segue.plan_replacement(
        study.model,
        every,
        study.student,
        study.budget,
        sites=study.sites,
        cost_batch=study.cost_batch,
        folder=folder,
        seed=seed,
        progress=None,
        **settings,
    )
    options, everything = list(planned.prediction.options), subsets(len(planned.prediction.options))
    count = len(options)
    found = {
        "uniform": Ranking(_uniform(everything, count)),
        "last layers": Ranking(_added(everything, [float(count - i) for i in range(count)])),
        "first layers": Ranking(_added(everything, [float(1 + i) for i in range(count)])),
        "segue plan": Ranking(
            {subset: planned.prediction.of([options[i] for i in subset]) for subset in everything},
            planned.spent["inputs"],
            planned.spent["flops"],
        ),
    }
    with candidates_on(study.model, study.sites, named([study.student]), every[0], seed) as candidates:
        work = _Work(candidates, every, planned, folder, {**defaults(), **settings})
        if [work.errors[option] for option in options] != [planned.errors[option] for option in options]:
            raise SystemExit("the students of the plan and of the other planners differ.")
        found |= work.measured(everything)
        found |= {} if cheap else work.others(everything)
    return found if cheap else {**found, "restore one, trained": _restored(study, everything, work.held, seed)}


class _Work:
    """The planners that share the students of a local fit, and its cost."""

    def __init__(
        self, candidates: Candidates, every: list[Any], planned: Planned, folder: Path, settings: dict[str, Any]
    ) -> None:
        self.candidates, self.planned = candidates, planned
        self.held, fitted = planner.split(candidates.model, every, settings["measure_on"], settings["fit_steps"])
        steps = settings["fit_steps"]
        key = json.loads((folder / FILE).read_text(encoding="utf-8").split("\n")[0])["key"]
        self.errors = fit_candidates(
            candidates,
            fitted,
            fit_recipe(steps, settings["lr"]),
            Journal(folder, key),
            closed_form=settings["closed_form"],
            shown=Progress(None, steps),
        )
        seen = sum(_inputs(fitted[i % len(fitted)]) for i in range(steps))
        self.fit = Ranking({}, seen, step_operations(candidates, fitted[0]) * seen / _inputs(fitted[0]))
        self.inputs = sum(map(_inputs, self.held))

    def measured(self, everything: list[Subset]) -> dict[str, Ranking]:
        """Rank by what the plan has measured, which is counted and not measured again."""
        count, options, first = len(self.candidates.options), self.candidates.options, self.held[0]
        found = {"local error": self._ranking(_added(everything, [self.errors[o] for o in options]), 0, 0)}
        _, spent = _counted(lambda: self.kl([(i,) for i in range(count)], [first]))
        alone = self.planned.prediction.alone
        found["leave one out"] = self._ranking(_added(everything, alone), spent * self.inputs / _inputs(first), count + 1)
        _, spent = _counted(lambda: damage.curvature(self.candidates, first, padding_mask(first)))
        curved = sum(map(_inputs, self.held[: planner.CURVED]))
        singles, pairs = quadratic(options, self.planned.matrix)
        scores = {(*s,): float(singles[[*s]].sum() + pairs[[*s]][:, [*s]].sum()) for s in everything}
        found["quadratic form"] = self._ranking(scores, spent * curved / _inputs(first), count * curved / self.inputs)
        return found

    def others(self, everything: list[Subset]) -> dict[str, Ranking]:
        """Rank by measurements of their own."""
        count = len(self.candidates.options)
        complete = tuple(range(count))
        others = [tuple(j for j in complete if j != i) for i in complete]
        (together, *without), spent = _counted(lambda: self.kl([complete, *others], self.held))
        found = {"restore one": self._ranking(_added(everything, [together - left for left in without]), spent, count + 2)}
        gates, more = _counted(lambda: self.gates(together / count))
        passes = 2 * GATE_STEPS / len(self.held)  # of the original, and of the blend
        found["learned gates"] = self._ranking(
            _added(everything, [1 - z for z in gates]), spent / (count + 2) * 2 + more, passes + 2
        )
        return found

    def kl(self, chosen: Sequence[Subset], batches: Sequence[Any]) -> list[float]:
        """Return the mean divergence of subsets."""
        options = self.candidates.options
        total, count = torch.zeros(len(chosen), dtype=torch.float64), 0
        for batch in batches:
            shown = [[options[i] for i in subset] for subset in chosen]
            found = damage.divergences(self.candidates, batch, padding_mask(batch), shown)
            total += torch.tensor([one.kl for one in found], dtype=torch.float64)
            count += found[0].predictions
        return (total / count).tolist()

    def gates(self, penalty: float) -> list[float]:
        """Train only the students' weights z, by the divergence of the blend less a reward for every z.

        The reward is the mean damage of a site when all are replaced, so that not all gates go to one end.
        """
        raw = torch.zeros(len(self.candidates.options), requires_grad=True)
        optimizer = torch.optim.Adam([raw], lr=GATE_RATE)
        for step in range(GATE_STEPS):
            batch = self.held[step % len(self.held)]
            with self.candidates.showing(()) as model:
                before = damage.counted(damage.logits(model, batch), padding_mask(batch)).log_softmax(-1)
            z = raw.sigmoid()
            after = damage.counted(self._blended(batch, z), padding_mask(batch)).log_softmax(-1)
            loss = F.kl_div(after, before, reduction="batchmean", log_target=True) - penalty * z.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return raw.sigmoid().tolist()

    def _blended(self, batch: Any, z: Tensor) -> Tensor:
        """Return the logits of the blend, with a graph to its weights alone."""
        handles, outputs = [], {}
        for i, option in enumerate(self.candidates.options):
            seam, student = self.candidates.handover.seams[option[0]], self.candidates.students[option].requires_grad_(False)
            layers = layers_of(seam.require_teacher())

            def before(_layer: nn.Module, args: Any, kwargs: Any, i: int = i, student: nn.Module = student) -> None:
                args, kwargs = copy_caches(args, kwargs)
                with captured_outputs():
                    outputs[i] = student(*args, **kwargs)

            def after(_layer: nn.Module, _args: Any, output: Any, i: int = i, site: Any = seam.site) -> Any:
                return merge(output, outputs.pop(i), lambda t, s: torch.lerp(t, s, z[i].to(t.dtype)), site)

            handles += [layers[0].register_forward_pre_hook(before, with_kwargs=True), layers[-1].register_forward_hook(after)]
        try:
            with isolated(self.candidates.handover), torch.enable_grad():
                for seam in self.candidates.handover.seams.values():
                    seam.configure(view=View.TEACHER)
                return damage.logits(self.candidates.model, batch)
        finally:
            for handle in handles:
                handle.remove()

    def _ranking(self, scores: dict[Subset, float], operations: float, passes: float) -> Ranking:
        """Return a ranking that took so many operations, and passes of all batches to measure on, besides the local fit."""
        return Ranking(scores, self.fit.inputs + passes * self.inputs, self.fit.flops + operations)


def _restored(study: Study, everything: list[Subset], held: list[Any], seed: int) -> Ranking:
    """Rank as KL-guided selection does: train all students together, then put each original back and see what that gains."""
    names = [site.name for site in segue.sites.select(study.model, study.sites)]
    students = trained(study, tuple(names), seed)
    kl, operations = _counted(lambda: _restoring(study, students, names, held))
    gains = [kl[0] - left for left in kl[1:]]
    seen = study.steps * _inputs(inputs(next(iter(study.train)))) + (len(names) + 2) * sum(map(_inputs, held))
    return Ranking(_added(everything, gains), seen, operations + training_flops(study, tuple(names)))


@torch.no_grad()
def _restoring(study: Study, students: nn.Module, names: list[str], held: list[Any]) -> list[float]:
    """Return the KL of the trained model, and of the same with the original of each site put back."""
    found = []
    for back in (None, *names):
        own = None if back is None else students.get_submodule(back)
        if back is not None:
            students.set_submodule(back, study.model.get_submodule(back))
        kl, count = 0.0, 0
        for batch in held:
            after, before = (
                damage.counted(damage.logits(model, batch), padding_mask(batch)).log_softmax(-1)
                for model in (students, study.model)
            )
            kl += float(F.kl_div(after, before, reduction="sum", log_target=True))
            count += len(before)
        found.append(kl / count)
        if back is not None and own is not None:
            students.set_submodule(back, own)
    return found


def _counted(run: Callable[[], T]) -> tuple[T, float]:
    """Run something, and return what it returns and how many operations it took."""
    kept: list[T] = []
    operations = flops(lambda: kept.append(run()))
    return kept[0], float(operations)


def _inputs(batch: Any) -> int:
    return batch["input_ids"].numel() if isinstance(batch, dict) else len(batch)


def _added(everything: list[Subset], each: Sequence[float]) -> dict[Subset, float]:
    return {subset: float(sum(each[i] for i in subset)) for subset in everything}


def _uniform(everything: list[Subset], count: int) -> dict[Subset, float]:
    """Prefer evenly spaced sites: more sites are worse, and of equally many those that are far from even spacing."""
    found = {}
    for subset in everything:
        even = [(i + 0.5) * count / len(subset) - 0.5 for i in range(len(subset))]
        found[subset] = count * len(subset) + sum(abs(a - b) for a, b in zip(subset, even, strict=True))
    return found


def random_scores(count: int, seed: int) -> dict[Subset, float]:
    """Return one random order of the sites."""
    each = torch.rand(count, generator=torch.Generator().manual_seed(seed)) + 1e-3
    return _added(subsets(count), each.tolist())
