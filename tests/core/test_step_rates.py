"""The rates that the steps of an optimizer have; those of phases and guards together are in test_guarded_loops.py."""

import copy

import torch
from torch import nn

import segue
from segue.phases import Phase, Rates
from tests.helpers.tiny import SITES, same_bits, start, train
from tests.training.fit_cases import half_copied


def slowed():
    handover = segue.replace_(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), segue.Plan(sites="0"), total_steps=8)
    optimizer, seen = torch.optim.SGD(handover.parameters(), lr=0.25), []
    handover.rates.slow_down(handover, optimizer, lambda: 0.5)
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
    return handover, optimizer, seen


def test_a_step_inside_the_closure_of_another_is_slowed_down_once():
    """As Lightning takes the updates of a local phase: the outer step has set its rate already."""
    _, optimizer, seen = slowed()
    optimizer.step(lambda: optimizer.step())
    assert seen == [0.125, 0.125]
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_copied_handover_has_rates_of_its_own():
    handover, _, _ = slowed()
    twin = copy.deepcopy(handover)
    other = torch.optim.SGD(twin.parameters(), lr=0.25)
    twin.schedule_rates(other)
    other.step()
    assert vars(twin.rates) == vars(segue.core.step_rates.StepRates())


def test_a_finished_handover_leaves_the_rates_alone():
    handover, optimizer, seen = slowed()
    handover.finalize_(force=True)
    optimizer.step()
    assert seen == [0.25]


def test_what_has_a_rate_of_zero_is_left_alone_and_so_is_its_state():
    """In a loop of one's own; weight decay and momentum would move it otherwise."""
    phases = (Phase(name="a", length=0.5, lr=Rates(new=0.1, copied=0.0)), Phase(name="b", lr=Rates(new=0.1, copied=0.1)))
    handover = start(segue.Plan(sites=SITES, student=half_copied, phases=phases), total_steps=4)
    optimizer = torch.optim.AdamW(handover.parameter_groups(weight_decay=0.5), lr=1.0)
    handover.schedule_rates(optimizer)
    kinds = handover.parameter_kinds()
    copied = [p for name, p in handover.named_parameters() if kinds[name] == "copied"]
    assert len(copied) == 6  # weight and bias of three projections
    before = [p.detach().clone() for p in copied]
    train(handover, optimizer, 2)
    assert all(same_bits(p, was) for p, was in zip(copied, before, strict=True))
    assert not any(p in optimizer.state for p in copied)
    train(handover, optimizer, 1)
    assert not any(torch.equal(p, was) for p, was in zip(copied, before, strict=True))
    assert {optimizer.state[p]["step"].item() for p in copied} == {1}
