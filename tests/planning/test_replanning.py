"""replan(): the sites that are left, ordered where the others have taken over, and a handover that follows."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import segue
from segue.errors import HandoverError
from segue.planning import replan
from segue.planning.replanning import _damage
from segue.schedules import Adaptive, Constant, PerSite
from tests.planning import cases


def started(schedule=None, **settings):
    model, batches, _ = cases.vit()
    own = PerSite(schedules={"blocks.1.attn": Constant(alpha=0.0)}, otherwise=segue.schedules.Linear(until=0.8))
    plan = segue.Plan(sites="blocks.*.attn", student=segue.students.LinearAttention(), schedule=schedule or own, **settings)
    return segue.replace_(model, plan, total_steps=10), batches


def test_each_site_adds_the_least_to_those_before_it():
    handover, batches = started()
    found = replan(handover, batches)
    assert set(found.order) == {"blocks.0.attn", "blocks.2.attn"}
    done = ["blocks.1.attn"]
    for name in found.order:
        added = {other: _damage(handover, batches, [*done, other]) for other in handover.seams if other not in done}
        assert min(added, key=added.get) == name
        assert found.added[name] == pytest.approx(added[name] - _damage(handover, batches, done))
        done.append(name)


def test_damage_is_that_of_the_model_with_these_students():
    handover, batches = started()
    model = handover.model.eval()
    with torch.no_grad():
        with handover.as_teacher():
            before = [model(batch).log_softmax(-1) for batch in batches]
        with handover.as_student():
            after = [model(batch).log_softmax(-1) for batch in batches]
    expected = sum(float((b.exp() * (b - a)).sum()) for b, a in zip(before, after, strict=True)) / 8
    assert _damage(handover, batches, list(handover.seams)) == pytest.approx(expected, rel=1e-4)


def test_the_run_goes_on_from_its_alphas_and_ends():
    handover, batches = started()
    model = handover.model.train()
    optimizer = torch.optim.AdamW(handover.parameters(), lr=1e-3)
    seen = [handover.alphas]
    for step in range(10):
        if step == 4:
            before = handover.alphas
            order = replan(handover, batches, window=0.9).order
            assert handover.alphas == pytest.approx(before)
            assert handover.plan.schedule.schedules["blocks.1.attn"] == Constant(alpha=0.0)
        F.cross_entropy(model(batches[0]), torch.arange(4)).backward()
        optimizer.step()
        handover.step()
        seen.append(handover.alphas)
    for name in handover.seams:
        assert all(b[name] <= a[name] + 1e-9 for a, b in itertools.pairwise(seen))
    first, second = order
    assert seen[7][first] < seen[7][second]
    handover.finalize_()


def test_what_cannot_be_replanned_is_refused():
    handover, batches = started(Adaptive(), guidance=segue.losses.FeatureGuidance())
    with pytest.raises(HandoverError, match="a schedule and a length"):
        replan(handover, batches)
    with pytest.raises(HandoverError, match="schedules that measure nothing"):
        handover.reschedule(Constant(alpha=1.0))
    handover, batches = started(Constant(alpha=0.0))
    with pytest.raises(HandoverError, match="a site that is left"):
        replan(handover, batches)


def test_another_schedule_is_followed_and_saved(tmp_path):
    handover, _ = started()
    handover.reschedule(Constant(alpha=0.25))
    assert set(handover.alphas.values()) == {0.25}
    assert handover.describe()["plan"]["schedule"] == {"kind": "schedules.Constant", "alpha": 0.25}
    with pytest.raises(segue.errors.PlanError, match="matches none of the 3 sites"):
        handover.reschedule(PerSite(schedules={"blocks.9.attn": Constant()}))
    assert set(handover.alphas.values()) == {0.25}
