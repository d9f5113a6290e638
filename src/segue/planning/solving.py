"""Solving: which option at which site, under a budget; exact where there are few choices, else by scipy's milp with a bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import torch
from torch import Tensor

from segue.border import Fraction, PositiveFloat, checked
from segue.errors import MissingExtraError, PlanError
from segue.planning.candidates import Option
from segue.planning.costs import METRICS, CostTable, Metric
from segue.planning.prediction import Prediction

COUNTED: tuple[Metric, ...] = ("flops", "cache_bytes", "parameters")  # what is saved where a budget does not say it
FEW = 50_000  # choices that are all tried
SECONDS = 20.0  # for one solution by milp
FRONTIER_SECONDS = 60.0  # for all points of a frontier together

Row = tuple[dict[int, float], float]  # terms by their place, and the most that they may add up to


@checked
@dataclass(frozen=True, kw_only=True)
class Quality:
    """Lose at most so much, and save as much as that allows: one limit, and the metric to save.

    `kl` is the divergence of the predictions from the original's, in nats, before training; `differing` the fraction of
    predictions whose first choice changes, which no drop of accuracy exceeds.
    """

    kl: PositiveFloat | None = None
    differing: Fraction | None = None
    saves: Metric | None = None  # the first of COUNTED that a candidate saves

    def __post_init__(self) -> None:
        if (self.kl is None) == (self.differing is None):
            raise PlanError(
                f"Quality(kl={self.kl}, differing={self.differing}) is not a budget.",
                "Exactly one of the two is the limit.",
                "give Quality(kl=0.1), or Quality(differing=0.05).",
            )


@checked
@dataclass(frozen=True, kw_only=True)
class Saving:
    """Save at least these fractions of the complete model, and lose as little as that allows."""

    flops: Fraction | None = None
    parameters: Fraction | None = None
    cache_bytes: Fraction | None = None
    prefill: Fraction | None = None
    decode: Fraction | None = None
    train: Fraction | None = None

    def __post_init__(self) -> None:
        if not self.wanted:
            raise PlanError("Saving() is not a budget.", "It has no limit.", "give for example Saving(flops=0.3).")

    @property
    def wanted(self) -> dict[str, float]:
        return {name: value for name in METRICS if (value := getattr(self, name)) is not None}


@checked
@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Show the least damage at every level of saving, and choose the plan of one level: a fraction of the most."""

    saves: Metric | None = None  # the first of COUNTED that a candidate saves
    choose: Fraction = 0.5


Budget = Quality | Saving | Frontier


@dataclass(frozen=True)
class Solution:
    """A choice of options, and how much better another one could be, by the same prediction."""

    subset: tuple[Option, ...]
    gap: float = 0.0  # of the objective; 0 where it is the best


class Problem:
    """Damage and savings as numbers: at most one option at each site."""

    def __init__(self, prediction: Prediction, costs: CostTable) -> None:
        self.options = list(prediction.options)
        self.prediction, self.costs = prediction, costs
        self.sites = list(dict.fromkeys(site for site, _ in self.options))
        self.at = {site: [i for i, option in enumerate(self.options) if option[0] == site] for site in self.sites}
        choices = math.prod(len(here) + 1 for here in self.at.values())
        self._all = self._every() if choices <= FEW else None

    def saved(self, metric: str) -> Tensor:
        """Return what each option saves."""
        return torch.tensor([self.costs.saved(option, metric) for option in self.options], dtype=torch.float64)

    def least_damage(self, wanted: Mapping[str, float], seconds: float | None = None) -> Solution | None:
        """Return the choice with the least damage that saves at least so much; None if there is none."""
        limits = [(self.saved(metric), least) for metric, least in wanted.items()]
        if self._all is not None:
            ok = torch.ones(len(self._all), dtype=torch.bool)
            for values, least in limits:
                ok &= self._all @ values >= least - 1e-12
            return self._best(torch.where(ok, -self._damages(), -math.inf))
        return self._by_milp(None, [(-values, -least) for values, least in limits], seconds=seconds)

    def most_saved(self, metric: str, most: float) -> Solution | None:
        """Return the choice that saves most with at most so much damage."""
        values = self.saved(metric)
        if self._all is not None:
            damages = self._damages()
            within = torch.where(damages <= most, self._all @ values, -math.inf)
            tie = 1e-12 * damages / (damages.max() + 1e-30)  # of equal savings, the least damage
            return self._best(within - tie)
        return self._by_milp(values, [], most)

    def _every(self) -> Tensor:
        """Return all choices as rows of 0 and 1."""
        rows = torch.zeros(1, len(self.options), dtype=torch.float64)
        for here in self.at.values():
            parts = [rows]
            for i in here:
                chosen = rows.clone()
                chosen[:, i] = 1.0
                parts.append(chosen)
            rows = torch.cat(parts)
        return rows

    def _damages(self) -> Tensor:
        assert self._all is not None
        p = self.prediction
        return (self._all @ p.singles + ((self._all @ p.pairs) * self._all).sum(1)).clamp_min(0)

    def _best(self, scores: Tensor) -> Solution | None:
        assert self._all is not None
        place = int(scores.argmax())
        if not math.isfinite(float(scores[place])):
            return None
        return Solution(tuple(option for option, inside in zip(self.options, self._all[place].tolist(), strict=True) if inside))

    def _by_milp(
        self,
        saves: Tensor | None,
        limits: Sequence[tuple[Tensor, float]],
        most: float | None = None,
        seconds: float | None = None,
    ) -> Solution | None:
        """Linearise the products of pairs, and solve: minimise the damage, or maximise what is saved below `most`."""
        try:
            import numpy as np
            from scipy import optimize, sparse
        except ImportError:
            raise MissingExtraError("planning needs scipy.", "It is not installed.", "pip install 'segue[lab]'") from None
        p, count = self.prediction, len(self.options)
        pairs = [(i, j) for i, j in combinations(range(count), 2) if self.options[i][0] != self.options[j][0]]
        width = count + len(pairs)
        damage = np.concatenate([p.singles.numpy(), [float(p.pairs[i, j]) for i, j in pairs]])
        rows = self._rows(pairs, limits)
        rows += [] if most is None else [(dict(enumerate(damage.tolist())), most)]
        places = [(row, column, value) for row, (terms, _) in enumerate(rows) for column, value in terms.items()]
        matrix = sparse.csr_array(
            ([v for _, _, v in places], ([r for r, _, _ in places], [c for _, c, _ in places])), shape=(len(rows), width)
        )
        objective = damage if saves is None else np.concatenate([-saves.numpy(), np.zeros(len(pairs))])
        found = optimize.milp(
            objective,
            integrality=np.concatenate([np.ones(count), np.zeros(len(pairs))]),
            bounds=optimize.Bounds(0, 1),
            constraints=optimize.LinearConstraint(matrix, ub=np.array([limit for _, limit in rows])),
            options={"time_limit": SECONDS if seconds is None else seconds},
        )
        if found.status == 2:  # proved to be impossible
            return None
        known = [] if found.x is None else [tuple(o for o, x in zip(self.options, found.x, strict=False) if x > 0.5)]
        guess = self._greedy(saves, limits, most)
        known += [] if guess is None else [guess]
        if not known:
            return None
        scores = [self._objective(subset, saves) for subset in known]
        best = min(range(len(known)), key=scores.__getitem__)
        bound = getattr(found, "mip_dual_bound", None)
        least = -math.inf if bound is None else float(bound)
        gap = scores[best] - (max(0.0, least) if saves is None else least)  # no damage is below 0
        return Solution(known[best], gap if gap > 1e-9 * abs(scores[best]) else 0.0)  # less is rounding

    def _rows(self, pairs: Sequence[tuple[int, int]], limits: Sequence[tuple[Tensor, float]]) -> list[Row]:
        """Return the constraints on the options and on the products of pairs, as terms and what they may add up to.

        A product is what it should be by the products of all constraints with each option, and with its absence; those of the
        limits make the bound of the relaxation much closer.
        """
        count = len(self.options)
        place = {pair: count + k for k, pair in enumerate(pairs)}
        given: list[Row] = [(dict.fromkeys(here, 1.0), 1.0) for here in self.at.values()]
        given += [({i: float(v) for i, v in enumerate(values)}, limit) for values, limit in limits]
        rows = list(given)
        for i, (site, _) in enumerate(self.options):
            with_i = {j: place.get((min(i, j), max(i, j))) for j in range(count)}  # None at the same site: never both
            for terms, limit in given:
                if set(terms) == set(self.at[site]):
                    continue
                products = {k: v for j, v in terms.items() if (k := with_i[j]) is not None}
                own = terms.get(i, 0.0)
                rows.append(({**products, i: own - limit}, 0.0))
                without = {j: v for j, v in terms.items() if j != i}
                rows.append(({**without, **{k: -v for k, v in products.items()}, i: limit}, limit))
        return rows

    def _objective(self, subset: Sequence[Option], saves: Tensor | None) -> float:
        if saves is None:
            return self.prediction.of(subset)
        return -sum(float(saves[self.options.index(option)]) for option in subset)

    def _greedy(
        self, saves: Tensor | None, limits: Sequence[tuple[Tensor, float]], most: float | None
    ) -> tuple[Option, ...] | None:
        """Add, exchange or remove one option at a time while that helps: first to be possible, then to be better."""

        def rank(choice: Mapping[str, int | None]) -> tuple[float, float]:
            subset = tuple(self.options[i] for i in choice.values() if i is not None)
            inside = [i for i in choice.values() if i is not None]
            missing = sum(max(0.0, float(values[inside].sum()) - limit) for values, limit in limits)
            missing += 0.0 if most is None else max(0.0, self.prediction.of(subset) - most)
            return missing, self._objective(subset, saves)

        now: dict[str, int | None] = dict.fromkeys(self.sites)
        score = rank(now)
        while True:
            moves = [now | {site: other} for site, here in self.at.items() for other in (None, *here) if other != now[site]]
            moves += [
                now | {a: None, b: i}
                for a, b in product(self.sites, repeat=2)
                if a != b and now[a] is not None and now[b] is None
                for i in self.at[b]
            ]
            best = min(moves, key=rank)
            if rank(best) >= score:
                break
            now, score = best, rank(best)
        return None if score[0] > 1e-12 else tuple(self.options[i] for i in now.values() if i is not None)


def solve(budget: Budget, problem: Problem, differing: Problem) -> Solution:
    """Return the best choice under a budget; one that cannot be met is refused."""
    if isinstance(budget, Frontier):
        metric = metric_of(budget, problem.costs)
        level = budget.choose * most_possible(problem.costs, metric)
        found = problem.least_damage({metric: level * (1 - 1e-9)})
        assert found is not None
        return found
    if isinstance(budget, Saving):
        best = problem.least_damage(budget.wanted)
        if best is None:
            raise _impossible(budget, problem.costs)
        return best
    limited = problem if budget.kl is not None else differing
    limit = budget.kl if budget.kl is not None else budget.differing
    assert limit is not None
    metric = metric_of(budget, problem.costs)
    found = limited.most_saved(metric, limit)
    if found is None or not found.subset:
        saving = [option for option in limited.options if problem.costs.saved(option, metric) > 0]
        least = min(limited.prediction.of([option]) for option in saving)
        name = "a KL" if budget.kl is not None else "a fraction of differing predictions"
        raise PlanError(
            f"no candidate stays within {name} of {limit:g} and saves {metric}.",
            f"The least damage of a single one that saves any is {least:.3g}, before training.",
            "allow more, or give candidates that are closer to the original. Nothing was changed.",
        )
    return found


def most_possible(costs: CostTable, metric: str) -> float:
    """Return the most that can be saved: at each site by the option that saves most, if it saves anything."""
    best: dict[str, float] = {}
    for option in costs.students:
        best[option[0]] = max(best.get(option[0], 0.0), costs.saved(option, metric))
    return sum(best.values())


def metric_of(budget: Budget, costs: CostTable) -> str:
    """Return what a budget saves, the first of several; one that does not say takes the first that a candidate saves."""
    if isinstance(budget, Saving):
        return next(iter(budget.wanted))
    possible = (name for name in COUNTED if costs.total.get(name, 0.0) > 0 and most_possible(costs, name) > 0)
    return budget.saves or next(possible, COUNTED[0])


def require_possible(budget: Budget, costs: CostTable) -> None:
    """Refuse a budget on what this model does not have, or that no choice can meet, as far as the costs alone tell."""
    wanted: Mapping[str, float] = budget.wanted if isinstance(budget, Saving) else {metric_of(budget, costs): 0.0}
    for metric in wanted:
        if metric not in costs.total or costs.total[metric] <= 0:
            raise PlanError(
                f"{metric} cannot be saved in this model.",
                f"Measured are {', '.join(costs.total)}; decoding needs a causal model with a key/value cache and input_ids.",
                "choose another metric. Nothing was changed.",
            )
    if isinstance(budget, Saving):
        if any(most_possible(costs, metric) < least - 1e-12 for metric, least in wanted.items()):
            raise _impossible(budget, costs)
    elif most_possible(costs, metric_of(budget, costs)) <= 0:
        raise PlanError(
            f"no candidate saves {budget.saves or ', '.join(COUNTED[:-1]) + ' or ' + COUNTED[-1]}.",
            f"Measured on inputs of {costs.shape}, each costs as much as what it replaces, or more.",
            "give longer inputs (--cost-tokens), another metric (--saves), or cheaper candidates. Nothing was changed.",
        )


def _impossible(budget: Saving, costs: CostTable) -> PlanError:
    possible = ", ".join(f"{name} {most_possible(costs, name):.1%}" for name in budget.wanted)
    wanted = ", ".join(f"{name} {least:.1%}" for name, least in budget.wanted.items())
    return PlanError(
        f"no choice of these candidates saves {wanted}.",
        f"The most that each can be saved is {possible} of the model.",
        "ask for less, or give cheaper candidates. Nothing was changed.",
    )
