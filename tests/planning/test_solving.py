"""Solving: milp and the enumeration agree with a search by hand, and budgets that cannot be met are refused."""

import dataclasses
import itertools
import math

import pytest
import torch
from scipy.optimize import linprog

from segue.errors import PlanError
from segue.planning import solving
from segue.planning.costs import CostTable
from segue.planning.prediction import Prediction
from segue.planning.solving import Frontier, Problem, Quality, Saving

SITES = [f"layers.{i}" for i in range(5)]
OPTIONS = tuple((site, name) for site in SITES for name in "ab")


def prediction(seed: int) -> Prediction:
    generator = torch.Generator().manual_seed(seed)
    apart = torch.tensor([[a[0] != b[0] for b in OPTIONS] for a in OPTIONS])
    pairs = torch.where(apart, 0.3 * torch.randn(10, 10, generator=generator, dtype=torch.float64), 0.0).triu(1)
    return Prediction(OPTIONS, torch.rand(10, generator=generator, dtype=torch.float64) + 0.5, pairs, 0.1, 0.0, 0.9, 64)


def costs(seed: int) -> CostTable:
    generator = torch.Generator().manual_seed(100 + seed)
    teachers = {site: {"flops": 10.0, "parameters": 10.0} for site in SITES}
    students = {
        option: dict(zip(("flops", "parameters"), (10 * torch.rand(2, generator=generator)).tolist(), strict=True))
        for option in OPTIONS
    }
    return CostTable({"flops": 100.0, "parameters": 100.0}, teachers, students, "1 x 8")


def every_choice():
    for names in itertools.product(("", "a", "b"), repeat=len(SITES)):
        yield tuple((site, name) for site, name in zip(SITES, names, strict=True) if name)


@pytest.fixture(params=[10**6, 0], ids=["enumeration", "milp"])
def few(request, monkeypatch):
    monkeypatch.setattr(solving, "FEW", request.param)


@pytest.mark.parametrize("seed", range(4))
def test_the_least_damage_is_that_of_a_search(few, seed):
    p, c = prediction(seed), costs(seed)
    wanted = {"flops": 0.15, "parameters": 0.1}
    found = Problem(p, c).least_damage(wanted)
    possible = [s for s in every_choice() if all(sum(c.saved(o, m) for o in s) >= v for m, v in wanted.items())]
    assert all(sum(c.saved(option, metric) for option in found.subset) >= least - 1e-9 for metric, least in wanted.items())
    assert p.of(found.subset) == pytest.approx(min(map(p.of, possible)), abs=1e-6)
    assert found.gap == 0 or found.gap > 1e-9 * p.of(found.subset)  # rounding is no gap


@pytest.mark.parametrize("seed", range(4))
def test_the_most_saved_is_that_of_a_search(few, seed):
    p, c = prediction(seed), costs(seed)
    found = Problem(p, c).most_saved("flops", 1.5)
    assert p.of(found.subset) <= 1.5 + 1e-6
    best = max(sum(c.saved(o, "flops") for o in s) for s in every_choice() if p.of(s) <= 1.5)
    assert sum(c.saved(option, "flops") for option in found.subset) == pytest.approx(best, abs=1e-6)
    assert found.gap == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_the_greedy_search_is_possible_and_not_far_off(seed):
    p, c = prediction(seed), costs(seed)
    problem = Problem(p, c)
    limit = [(-problem.saved("flops"), -0.15)]
    found = problem._greedy(None, limit, None)
    assert sum(c.saved(option, "flops") for option in found) >= 0.15 - 1e-9
    assert p.of(found) <= 1.5 * p.of(problem.least_damage({"flops": 0.15}).subset) + 0.1


def test_a_search_that_is_cut_short_says_how_much_better_another_choice_could_be(monkeypatch):
    monkeypatch.setattr(solving, "FEW", 0)
    monkeypatch.setattr(solving, "SECONDS", 0.0)
    p, c = prediction(0), costs(0)
    found = Problem(p, c).least_damage({"flops": 0.15})
    best = min(p.of(s) for s in every_choice() if sum(c.saved(o, "flops") for o in s) >= 0.15)
    assert p.of(found.subset) - found.gap <= best + 1e-9


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (Saving(flops=0.9), "no choice of these candidates saves flops 90.0%."),
        (Quality(kl=1e-6), "no candidate stays within a KL of 1e-06 and saves flops."),
    ],
)
def test_a_budget_that_cannot_be_met_is_refused(few, budget, text):
    problem = Problem(prediction(0), costs(0))
    with pytest.raises(PlanError) as error:
        solving.solve(budget, problem, problem)
    assert str(error.value).splitlines()[0] == text
    assert len(str(error.value).splitlines()) == 3


def test_a_metric_that_the_model_does_not_have_is_refused():
    with pytest.raises(PlanError, match="cache_bytes cannot be saved in this model."):
        solving.require_possible(Saving(cache_bytes=0.1), costs(0))


@pytest.mark.parametrize("budget", [Frontier(), Quality(kl=99.0), Quality(differing=1.0, saves="parameters")])
def test_candidates_that_save_nothing_are_refused_by_their_costs_alone(budget):
    c = costs(0)
    dear = CostTable(c.total, c.teachers, {option: {"flops": 20.0, "parameters": 20.0} for option in OPTIONS}, "1 x 8")
    with pytest.raises(PlanError, match=f"no candidate saves {budget.saves or 'flops, cache_bytes or parameters'}."):
        solving.require_possible(budget, dear)
    with pytest.raises(PlanError, match="no choice of these candidates saves flops 90.0%"):
        solving.require_possible(Saving(flops=0.9), c)
    solving.require_possible(Saving(flops=0.15), c)


@pytest.mark.parametrize("budget", [Frontier(), Quality(kl=99.0), Quality(differing=0.99)])
def test_a_budget_that_does_not_say_what_saves_what_can_be_saved(few, budget):
    c = costs(0)
    assert solving.metric_of(budget, c) == "flops"
    students = {option: {**cost, "flops": 20.0} for option, cost in c.students.items()}
    slow = CostTable(c.total, c.teachers, students, "1 x 8")
    assert solving.metric_of(budget, slow) == "parameters"
    solving.require_possible(budget, slow)
    small = dataclasses.replace(prediction(0), singles=prediction(0).singles / 1000, pairs=0 * prediction(0).pairs)
    found = solving.solve(budget, Problem(small, slow), Problem(small, slow))
    assert sum(slow.saved(option, "parameters") for option in found.subset) > 0


@pytest.mark.parametrize("seed", range(4))
def test_the_relaxation_alone_is_close_to_the_best(seed):
    """Where time runs out, the bound that is said comes from it; without products of the limits it is a third of this."""
    p, c = prediction(seed), costs(seed)
    problem = Problem(p, c)
    pairs = [(i, j) for i, j in itertools.combinations(range(10), 2) if OPTIONS[i][0] != OPTIONS[j][0]]
    rows = problem._rows(pairs, [(-problem.saved("flops"), -0.15)])
    matrix = torch.zeros(len(rows), 10 + len(pairs))
    for row, (terms, _) in enumerate(rows):
        matrix[row, list(terms)] = torch.tensor(list(terms.values()))
    damages = [*p.singles.tolist(), *(float(p.pairs[pair]) for pair in pairs)]
    relaxed = linprog(damages, matrix.numpy(), [limit for _, limit in rows], bounds=(0, 1)).fun
    best = p.of(problem.least_damage({"flops": 0.15}).subset)
    assert 0.8 * best < relaxed < best + 1e-6


@pytest.mark.parametrize("wrong", [{}, {"kl": 0.1, "differing": 0.1}])
def test_a_quality_has_one_limit(wrong):
    with pytest.raises(PlanError, match="is not a budget"):
        Quality(**wrong)
    with pytest.raises(PlanError, match="is not a budget"):
        Saving()


def test_what_can_be_saved_is_the_best_of_each_site():
    c = costs(0)
    expected = sum(max(0.0, *(c.saved((site, name), "flops") for name in "ab")) for site in SITES)
    assert solving.most_possible(c, "flops") == pytest.approx(expected)
    assert math.isfinite(expected)
