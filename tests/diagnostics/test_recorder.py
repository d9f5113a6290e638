"""The recorder: what a run writes down is what the functions find, in one process and in two."""

from dataclasses import fields
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import segue
from segue.diagnostics import Recorder, curvature_bias, gate_gradient_variance, loss_path
from segue.errors import DataError, PlanError, SiteError
from segue.gates import Bernoulli, Blend
from segue.reporting.records import Point
from segue.schedules import Constant, Linear
from tests.diagnostics import recording_workers
from tests.helpers.processes import Ranks
from tests.helpers.tiny import SITES, batch, start, train

BATCHES = [batch(50, size=5), batch(51, size=5)]
QUICK = {"draws": 4, "points": 2, "iterations": 2, "examples": 3}
ALL = ("variance", "curvature", "path")


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def begin(gate=None, alpha=0.4, **settings):
    plan = segue.Plan(sites=SITES, gate=gate or Bernoulli(), schedule=Constant(alpha=alpha), **settings)
    return start(plan, depth=2)


def test_its_quantities_are_fields_of_a_point_by_site():
    found = Recorder(BATCHES, loss_fn, ALL, **QUICK)(begin())
    assert set(found) <= {field.name for field in fields(Point)}
    assert len(found) == 8
    for name, by_site in found.items():
        assert list(by_site) == ["blocks.0.attn", "blocks.1.attn"], name
        assert all(isinstance(value, float) for value in by_site.values()), name


def test_the_numbers_are_those_of_the_functions():
    handover = begin()
    handover.resume_at(3)
    found = Recorder(BATCHES, loss_fn, ALL, **QUICK)(handover)
    variance = gate_gradient_variance(handover, BATCHES, loss_fn, None, draws=4, most_outcomes=4, seed=3).together
    few = [tuple(part[:3] for part in BATCHES[0])]
    curvature = curvature_bias(handover, few, loss_fn, None, points=2, iterations=2)
    path = loss_path(handover, few, loss_fn, None, points=2)
    for site, one in variance.sites.items():
        assert found["gate_variance"][site] == one.gate > 0
        assert found["gate_variance_error"][site] == one.standard_error
        assert found["data_variance"][site] == one.data
        assert found["predicted_variance"][site] == one.predicted
        assert found["curvature_bias"][site] == curvature.sites[site].bias > 0
        assert found["curvature_bound"][site] == curvature.sites[site].bound
        assert found["path_rise"][site] == path.sites[site].rises[-1]
        assert found["path_bound"][site] == path.sites[site].bounds[-1]


def test_draws_differ_from_step_to_step_and_repeat_at_a_step():
    handover = begin()
    recorder = Recorder(BATCHES, loss_fn, draws=4)
    handover.resume_at(1)
    many = start(segue.Plan(sites=SITES, gate=Bernoulli(), schedule=Constant(alpha=0.4)), depth=3)
    found = []
    for step in (1, 2, 1):
        many.resume_at(step)
        found.append(recorder(many)["gate_variance"])
    assert found[0] == found[2] != found[1]
    assert all(error > 0 for error in recorder(many)["gate_variance_error"].values())
    assert not any(recorder(handover)["gate_variance_error"].values())  # two coins have four outcomes: exact


def test_a_blend_has_no_bias_and_nobody_looks_for_its_curvature():
    calls = []

    def counted(model, batch):
        calls.append(1)
        return loss_fn(model, batch)

    found = Recorder(BATCHES, counted, ("curvature",), **QUICK)(begin(Blend()))
    assert not calls
    assert found == {name: {"blocks.0.attn": 0.0, "blocks.1.attn": 0.0} for name in ("curvature_bias", "curvature_bound")}
    assert set(Recorder(BATCHES, loss_fn, **QUICK)(begin(Blend()))["gate_variance"].values()) == {0.0}


def test_it_measures_at_certain_steps_only():
    handover = begin()
    recorder = Recorder(BATCHES, loss_fn, draws=4, at=(0, 2))
    seen = []
    for step in range(4):
        handover.resume_at(step)
        seen.append(bool(recorder(handover)))
    assert seen == [True, False, True, False]
    assert Recorder(BATCHES, loss_fn, draws=4, at=())(handover) == {}


def test_sites_can_be_chosen():
    recorder = Recorder(BATCHES, loss_fn, ALL, sites="blocks.1.attn", **QUICK)
    assert all(list(by_site) == ["blocks.1.attn"] for by_site in recorder(begin()).values())
    assert all(list(by_site) == ["blocks.1.attn"] for by_site in recorder(begin(Blend())).values())
    with pytest.raises(SiteError, match="'blocks.7.attn' matches none"):
        Recorder(BATCHES, loss_fn, sites="blocks.7.attn", draws=4)(begin())


def test_once_teachers_are_released_there_is_nothing_to_measure():
    plan = segue.Plan(sites=SITES, gate=Bernoulli(), schedule=Linear(until=0.2), release=True)
    handover = start(plan, depth=2)
    recorder = Recorder(BATCHES, loss_fn, ALL, **QUICK)
    assert recorder(handover)
    train(handover, torch.optim.SGD(handover.parameters(), lr=0.01), 3)
    assert all(seam.teacher is None for seam in handover.seams.values())
    assert recorder(handover) == {}


def test_an_unknown_measure_is_refused_with_the_nearest_names():
    with pytest.raises(PlanError, match=r"'varianse' is not a measure\.\s+.*variance"):
        Recorder(BATCHES, loss_fn, ["path", "varianse"])


def test_no_minibatches_are_refused_when_it_measures():
    with pytest.raises(DataError, match="`batches` is empty"):
        Recorder([], loss_fn, draws=4)(begin())


def test_what_does_not_count_examples_stays_whole():
    x, y = batch(0, size=5)
    made = {"x": x, "y": y, "scale": torch.tensor(2.0), "positions": torch.arange(4), "name": "first"}
    few = Recorder([made], loss_fn, examples=2).few[0]
    assert (len(few["x"]), len(few["y"]), few["scale"].item(), len(few["positions"]), few["name"]) == (2, 2, 2.0, 4, "first")
    assert len(Recorder([made], loss_fn, examples=99).few[0]["x"]) == 5


def test_a_generator_of_batches_serves_every_look():
    recorder = Recorder(iter(BATCHES), loss_fn, draws=4)
    handover = begin()
    assert recorder(handover) == recorder(handover) != {}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    jobs = {engine: partial(recording_workers.record, engine) for engine in recording_workers.ENGINES}
    return Ranks(jobs, tmp_path_factory.mktemp("ranks"))


@pytest.mark.processes
@pytest.mark.parametrize("engine", recording_workers.ENGINES)
def test_two_processes_record_the_numbers_of_one(engine, ranks):
    alone = recording_workers.record("one")
    assert len(alone) == 3
    for found in ranks[engine]:
        for point, wanted in zip(found, alone, strict=True):
            assert list(point) == list(wanted)
            for name in ("gate_variance", "data_variance", "predicted_variance", "curvature_bias", "curvature_bound"):
                assert point[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-7), name
            for name in ("path_rise", "path_bound"):
                assert point[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
