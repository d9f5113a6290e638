"""Raised alphas: teachers get a share back, and lose it again in time."""

import pytest
import torch

import segue
from segue.core.raised import Raised
from segue.core.step_state import step_state
from segue.errors import CheckpointError, HandoverError
from tests.checkpoint.test_restoring import forge, set_at
from tests.helpers.tiny import SITES, Net, constant, optimizer_for, start, train

SITE, OTHER = "blocks.1.attn", "blocks.0.attn"


def after(steps: int, schedule, total: int = 20, **plan) -> segue.Handover:
    handover = start(segue.Plan(sites=SITES, schedule=schedule, **plan), total_steps=total)
    for _ in range(steps):
        handover.step()
    return handover


def course(handover: segue.Handover, site: str = SITE) -> list[float]:
    """Return the alphas from here to the end of the run."""
    found = [handover.alphas[site]]
    while handover.steps_done < handover.total_steps:
        handover.step()
        found.append(handover.alphas[site])
    return found


def test_a_raised_alpha_falls_back_in_a_straight_line_and_other_sites_stay_as_they_are():
    handover = after(4, constant(0.0))
    handover.raise_alpha({SITE: 0.5}, over=5)
    assert handover.alphas == {OTHER: 0.0, SITE: 0.5, "blocks.2.attn": 0.0}
    assert course(handover) == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1] + [0.0] * 12)
    assert handover.alphas[SITE] == 0.0


def test_it_is_never_below_the_schedule_nor_above_what_was_asked_for():
    schedule = segue.schedules.Linear(until=0.8)
    handover, plain = after(8, schedule), after(8, schedule)
    handover.raise_alpha({SITE: 0.9}, over=6)
    found, wanted = course(handover), course(plain)
    assert found[0] == pytest.approx(0.9)
    assert all(one >= other for one, other in zip(found, wanted, strict=True))
    assert found[6:] == wanted[6:]
    assert found[-1] == 0.0


def test_alpha_is_back_after_half_of_the_steps_that_are_left_however_long_was_asked_for():
    handover = after(10, constant(0.0))
    handover.raise_alpha({SITE: 1.0}, over=1000)
    found = course(handover)
    assert [alpha > 0 for alpha in found] == [True] * 5 + [False] * 6
    handover.raise_alpha({SITE: 1.0}, over=1000)  # the run is over
    assert handover.alphas[SITE] == 0.0


def test_raising_again_does_not_lower_what_is_raised():
    handover = after(2, constant(0.0))
    handover.raise_alpha({SITE: 0.8}, over=8)
    handover.step()
    handover.raise_alpha({SITE: 0.1}, over=4)
    assert handover.alphas[SITE] == pytest.approx(0.7)


def test_the_step_state_is_a_pure_function_of_what_is_raised():
    plan, total = segue.Plan(sites=SITES, gate=segue.gates.Bernoulli()), 20
    sites = segue.select(Net(), SITES)
    raised = {SITE: Raised(0.6, since=10, until=14)}
    once, again = (step_state(plan, sites, 12, total, raised=raised) for _ in range(2))
    assert once == again
    assert once.sites[SITE].alpha == pytest.approx(0.3)
    assert once.sites[OTHER] == step_state(plan, sites, 12, total).sites[OTHER]


def test_a_released_teacher_gets_nothing_back_and_nothing_changes():
    handover = after(0, segue.schedules.Linear(until=0.2), release=True)
    train(handover, optimizer_for(handover), 6)
    before = dict(handover.alphas)
    with pytest.raises(HandoverError, match=r"alpha at site 'blocks.1.attn' must stay 0"):
        handover.raise_alpha({SITE: 0.5}, over=5)
    assert (handover.alphas, handover.raised) == (before, {})


def test_a_site_with_a_raised_alpha_is_not_released_before_it_is_back():
    handover = after(0, segue.schedules.Linear(until=0.5), release=True)
    optimizer = optimizer_for(handover)
    train(handover, optimizer, 9)
    handover.raise_alpha({SITE: 0.5}, over=4)
    train(handover, optimizer, 2)
    assert [seam.teacher is None for seam in handover.seams.values()] == [True, False, True]
    train(handover, optimizer, 3)
    assert handover.seams[SITE].teacher is None


@pytest.mark.parametrize(
    ("alphas", "words"),
    [({"blocks.1.atn": 0.5}, "there is no site 'blocks.1.atn'"), ({SITE: 1.5}, "must be"), ({SITE: float("nan")}, "must be")],
)
def test_wrong_sites_and_alphas_are_refused(alphas, words):
    handover = after(2, constant(0.0))
    with pytest.raises(HandoverError, match=words):
        handover.raise_alpha(alphas, over=5)
    assert handover.raised == {}


def test_a_run_without_a_length_has_nothing_to_fall_back_over():
    with pytest.raises(HandoverError, match=r"raise_alpha\(\) needs total_steps"):
        start(total_steps=None).raise_alpha({SITE: 0.5}, over=5)


def test_it_is_saved_and_resumed_bit_for_bit(tmp_path):
    def begun():
        torch.manual_seed(0)
        handover = after(0, constant(0.1), gate=segue.gates.Bernoulli())
        return handover, optimizer_for(handover)

    handover, optimizer = begun()
    train(handover, optimizer, 5)
    handover.raise_alpha({SITE: 0.7}, over=6)
    train(handover, optimizer, 2)
    segue.save(handover, tmp_path, optimizer=optimizer)
    wanted = [(train(handover, optimizer, 1), dict(handover.alphas)) for _ in range(8)]
    other, optimizer = begun()
    segue.load_(other, tmp_path, optimizer=optimizer)
    assert [(train(other, optimizer, 1), dict(other.alphas)) for _ in range(8)] == wanted


@pytest.mark.parametrize(
    "raised",
    [{"elsewhere": [0.5, 1, 5]}, *({SITE: wrong} for wrong in ([1.5, 1, 5], [0.5, 5, 5], [0.5, "1", 5], [None, 1, 5], 3, []))],
)
def test_a_file_that_raises_what_cannot_be_is_refused(raised, tmp_path):
    handover = after(2, constant(0.0))
    handover.raise_alpha({SITE: 0.5}, over=4)
    place = forge(segue.save(handover, tmp_path), set_at("raised", value=raised))
    other = after(0, constant(0.0))
    with pytest.raises(CheckpointError, match="cannot be understood"):
        segue.load_(other, place)
    assert (other.steps_done, other.raised) == (0, {})


def test_a_run_that_is_shortened_ends_without_a_raised_alpha():
    handover = start(segue.Plan(sites=SITES, schedule=segue.schedules.Linear(until=0.1)), total_steps=100)
    optimizer = optimizer_for(handover)
    train(handover, optimizer, 10)
    handover.raise_alpha({handover.sites[0].name: 0.5}, over=40)
    handover.total_steps = 12
    train(handover, optimizer, 2)
    assert set(handover.alphas.values()) == {0.0}
    handover.finalize_()
