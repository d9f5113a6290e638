"""The rates that the steps of an optimizer have; those of phases and guards together are in test_guarded_loops.py."""

import copy

import torch
from torch import nn

import segue


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
