import importlib.util

import pytest

import segue
from segue import gates, losses, phases, schedules
from segue.lab import variants
from segue.methods import ALL, LABELS, table
from segue.sites import Site
from tests.helpers.tiny import SITES, batch, optimizer_for, start, train

SITE = Site("x")
AGGR = schedules.aggr20()


@pytest.mark.parametrize("name", ALL)
def test_each_method_trains_and_ends_with_students_alone(name):
    handover = start(ALL[name](sites=SITES), total_steps=10)
    optimizer = optimizer_for(handover)
    handover.verify(batch()[0], optimizer=optimizer)
    train(handover, optimizer, 10)
    assert set(handover.alphas.values()) == {0.0}
    handover.finalize_()
    assert not any(type(m).__name__ == "Seam" for m in handover.model.modules())


@pytest.mark.parametrize("name", ALL)
def test_what_the_caller_says_wins(name):
    own = losses.CosineGuidance()
    plan = ALL[name](sites=SITES, gate=gates.GumbelSoftmax(temperature=3.0), train="all", guidance=own, seed=5)
    assert plan.gate == gates.GumbelSoftmax(temperature=3.0)
    assert (plan.train, plan.guidance, plan.seed) == ("all", own, 5)
    assert ALL[name](sites=SITES, schedule=schedules.Linear()).schedule == schedules.Linear()


@pytest.mark.parametrize("name", ALL)
def test_guidance_and_distillation_combine_in_every_method(name):
    handover = start(
        ALL[name](sites=SITES, guidance=losses.CosineGuidance(), distill=losses.LogitDistillation()), total_steps=10
    )
    optimizer, seen = optimizer_for(handover), set()
    for _ in range(10):
        handover.model(batch()[0])
        seen |= {part.partition("/")[0] for part in handover.losses()}
        train(handover, optimizer, 1)
    assert seen == {"guidance", "distill"}


def test_the_papers_settings():
    m = segue.methods
    assert m.dcr(sites="x").schedule == AGGR
    assert m.dcr(sites="x").gate == gates.Blend()
    assert not m.dcr(sites="x").teacher_gradient
    assert m.dcr_dfg(sites="x").guidance.schedule == AGGR
    assert m.theseus(sites="x").schedule(0.0, SITE) == 0.9
    assert m.theseus_gumbel(sites="x").gate == gates.GumbelSoftmax(temperature=1.0)
    assert m.gumbel_dfg(sites="x").guidance == m.dcr_dfg(sites="x").guidance
    assert m.distillation(sites="x").distill.temperature == 4.0
    assert m.student_only(sites="x").schedule(0.0, SITE) == 0.0


def test_the_corners():
    """`hold=` is short for two phases; a schedule of the caller's own replaces them."""
    lolcats = segue.methods.lolcats(sites="x", hold=0.4)
    assert [phases.alpha_of(lolcats, p, SITE) for p in (0.0, 0.39, 0.4, 1.0)] == [1, 1, 0, 0]
    assert [phases.holds(lolcats, p, SITE) for p in (0.0, 0.39, 0.4)] == [True, True, False]
    assert [phases.guidance_of(lolcats, p, SITE) for p in (0.0, 0.39, 0.4)] == [1, 1, 0]
    halo = segue.methods.halo(sites="x", hold=0.4)
    assert [phases.distill_of(halo, p, SITE) for p in (0.0, 0.39, 0.4, 1.0)] == [0, 0, 1, 1]
    first, then = segue.methods.transfer(sites="x").phases
    assert (first.split, then.fresh) == (8, True)  # small updates, whose moments are of no use afterwards
    assert (first.lr.new, first.lr.copied) == (1e-2, 1e-4)
    assert (then.lr.new, then.lr.copied) == pytest.approx((3e-4, 3e-5))
    assert segue.methods.transfer(sites="x", lr=1e-3, slower=0.5).phases[1].lr.new == 5e-4
    whole = segue.methods.lolcats(sites="x", hold=1.0)
    assert [phases.alpha_of(whole, p, SITE) for p in (0.0, 0.99, 1.0)] == [1, 1, 0]
    assert isinstance(segue.methods.fitnets(sites="x").guidance, losses.OnTeacherStream)


def test_the_table_lists_every_method():
    rows = table().splitlines()
    assert len(rows) == 2 + len(ALL)
    assert all(f"`{name}`" in row for name, row in zip(ALL, rows[2:], strict=True))


def test_a_new_method_is_listed_and_compared_by_itself(monkeypatch):
    """The lab, `segue methods` and the contracts take what the decorator adds; nothing else has to be edited."""
    monkeypatch.setattr(segue.methods, "ALL", dict(ALL))
    monkeypatch.setattr(segue.methods, "LABELS", dict(LABELS))

    @segue.methods.method(label="Gentle")
    def gentle(*, sites, **settings):
        """A slow blend."""
        return segue.Plan(sites=sites, **settings)

    fresh = importlib.util.module_from_spec(variants.__spec__)
    variants.__spec__.loader.exec_module(fresh)  # not the one that other tests use
    assert fresh.ALL["gentle"] == fresh.Variant("gentle", "Gentle", gentle)
    assert fresh.ALL["gentle"] in fresh.EXTRAS
    assert "| `gentle` | Blend | none | none | no | A slow blend. |" in table()


def test_every_method_is_a_function_of_the_module_and_has_a_label_of_its_own():
    own = {name for name, made in vars(segue.methods).items() if getattr(made, "__annotations__", {}).get("return") == "Plan"}
    assert {name for name in own if not name.startswith("_")} == set(ALL)
    assert len(set(LABELS.values())) == len(LABELS) == len(ALL)
