"""The planners that are compared: each gives every subset a number, the damage that it predicts, before any training.

All that look at students look at the same ones, after the same local fit, whose cost each of them pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.planner.studies import Study
from segue.core.blending import call_arguments, captured_outputs, merge
from segue.core.modes import View
from segue.core.views import isolated
from segue.diagnostics.counting import flops
from segue.planning import damage
from segue.planning.candidates import Candidates, candidates_on, logits_of, named
from segue.planning.fitting import fit_candidates
from segue.planning.journal import Journal
from segue.planning.prediction import corrected, uncorrected
from segue.students.attention.cache_copy import copy_caches
from segue.students.layers import layers_of
from segue.training.progress import Progress
from segue.training.recipe import Recipe

GATE_STEPS, GATE_RATE, GATE_PENALTY = 60, 0.1, 0.05
RANDOM = 100  # draws, whose mean is shown

Subset = tuple[int, ...]


@dataclass
class Ranking:
    """The damage that a planner predicts for every subset, and what it took to predict it."""

    scores: dict[Subset, float]
    inputs: float = 0.0  # tokens, or images, that pass a model
    flops: float = 0.0


def subsets(count: int) -> list[Subset]:
    """Return all subsets but the empty one."""
    return [chosen for size in range(1, count + 1) for chosen in combinations(range(count), size)]


def rank(study: Study, seed: int, *, batches: int, fit_steps: int, sampled: int) -> dict[str, Ranking]:
    """Let every planner rank all subsets."""
    held = study.planning_batches(batches)
    with candidates_on(study.model, study.sites, named([study.student]), held[0], seed) as candidates:
        work = _Work(candidates, held, seed)
        errors = work.fit(fit_steps)
        count = len(candidates.options)
        everything = subsets(count)
        found = {
            "uniform": Ranking(_uniform(everything, count)),
            "last layers": Ranking(_added(everything, [float(count - i) for i in range(count)])),
            "first layers": Ranking(_added(everything, [float(1 + i) for i in range(count)])),
            "local error": work.ranking(_added(everything, errors), 0, 0),
        }
        alone = work.kl([(i,) for i in range(count)])
        found["leave one out"] = work.ranking(_added(everything, alone), count + 1, 0)
        complete = tuple(range(count))
        restored = work.kl([complete, *(tuple(j for j in complete if j != i) for i in complete)])
        gains = [restored[0] - left for left in restored[1:]]
        found["restore one"] = work.ranking(_added(everything, gains), count + 2, 0)
        gates = work.gates()
        found["learned gates"] = work.ranking(_added(everything, [1 - z for z in gates]), 0, GATE_STEPS)
        matrix = sum(damage.curvature(candidates, batch, None, seed) for batch in held) / len(held)
        plain = uncorrected(candidates.options, matrix)
        found["quadratic form"] = work.ranking(_predicted(plain, candidates, everything), 2 * count, 0)
        drawn = damage.random_subsets(candidates.options, sampled, seed)
        place = {option: i for i, option in enumerate(candidates.options)}
        measured = work.kl([tuple(place[option] for option in subset) for subset in drawn])
        ours = corrected(candidates.options, matrix, drawn, measured)
        found["segue plan"] = work.ranking(_predicted(ours, candidates, everything), 2 * count + len(drawn) + 1, 0)
    return found


class _Work:
    """Measurements that the planners share, and their costs."""

    def __init__(self, candidates: Candidates, held: list[Any], seed: int) -> None:
        self.candidates, self.held, self.seed = candidates, held, seed
        args, kwargs = call_arguments(held[0])
        self.inputs = sum(_inputs(batch) for batch in held)
        with candidates.showing(()) as model:
            self.forward = float(flops(lambda: model(*args, **kwargs))) * len(held)
        self.fitted = 0.0

    def fit(self, steps: int) -> list[float]:
        recipe = Recipe(steps=steps, lr=1e-3, weight_decay=0.0, warmup=0.1)
        found = fit_candidates(
            self.candidates, self.held, recipe, Journal(None, ""), closed_form=False, shown=Progress(None, steps)
        )
        self.fitted = 2 * steps / len(self.held)  # in forwards of the model on all batches: the students learn in about one
        return [found[option] for option in self.candidates.options]

    def kl(self, chosen: Sequence[Subset]) -> list[float]:
        options = self.candidates.options
        total, count = torch.zeros(len(chosen), dtype=torch.float64), 0
        for batch in self.held:
            found = damage.divergences(self.candidates, batch, None, [[options[i] for i in subset] for subset in chosen])
            total += torch.tensor([one.kl for one in found], dtype=torch.float64)
            count += found[0].predictions
        return (total / count).tolist()

    def gates(self) -> list[float]:
        """Train only the students' weights z, by the divergence of the blend less a reward for every z."""
        raw = torch.zeros(len(self.candidates.options), requires_grad=True)
        optimizer = torch.optim.Adam([raw], lr=GATE_RATE)
        for step in range(GATE_STEPS):
            batch = self.held[step % len(self.held)]
            with self.candidates.showing(()) as model:
                args, kwargs = call_arguments(batch)
                before = damage.counted(logits_of(model(*args, **kwargs)).float(), None).log_softmax(-1)
            z = raw.sigmoid()
            after = damage.counted(self._blended(batch, z), None).log_softmax(-1)
            loss = F.kl_div(after, before, reduction="batchmean", log_target=True) - GATE_PENALTY * z.sum()
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
        args, kwargs = call_arguments(batch)
        try:
            with isolated(self.candidates.handover), torch.enable_grad():
                for seam in self.candidates.handover.seams.values():
                    seam.configure(view=View.TEACHER)
                return logits_of(self.candidates.model(*args, **kwargs)).float()
        finally:
            for handle in handles:
                handle.remove()

    def ranking(self, scores: dict[Subset, float], forwards: float, gate_steps: int) -> Ranking:
        """Return a ranking that took so many forwards on all batches, besides the local fit."""
        passes = forwards + self.fitted + 4 * gate_steps / len(self.held)  # a reference, a forward, and two for backward
        seen = forwards + self.fitted / 2 + 2 * gate_steps / len(self.held)
        return Ranking(scores, seen * self.inputs, passes * self.forward)


def _inputs(batch: Any) -> int:
    return batch["input_ids"].numel() if isinstance(batch, dict) else len(batch)


def _added(everything: list[Subset], each: Sequence[float]) -> dict[Subset, float]:
    return {subset: float(sum(each[i] for i in subset)) for subset in everything}


def _predicted(prediction: Any, candidates: Candidates, everything: list[Subset]) -> dict[Subset, float]:
    return {subset: prediction.of([candidates.options[i] for i in subset]) for subset in everything}


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
