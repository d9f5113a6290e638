"""A guard in a loop of one's own does what it does in fit()."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import segue
from segue.errors import HandoverError, TrainingError
from segue.phases import Phase
from tests.helpers.tiny import SITES, Net, same_state
from tests.training.fit_cases import fit
from tests.training.test_guard import BAD, GUARD, GUIDED, HALF, KEPT, STEPS, poisoned, recipe

FALLING = segue.Plan(sites=SITES, guidance=GUIDED, schedule=segue.schedules.Linear(until=0.9))


class Loop:
    """What a user writes."""

    def __init__(self, plan, batches, guard=GUARD, ema=None, resume=None, dropout=0.0):
        self.batches = batches
        self.model = Net(dropout=dropout).train()
        self.handover = segue.replace_(self.model, plan, total_steps=len(batches))
        self.optimizer = torch.optim.AdamW(self.handover.parameters(), lr=1e-3, weight_decay=0.0)
        if resume is not None:
            segue.load_(self.handover, resume, optimizer=self.optimizer)
        self.ema = None if ema is None else ema.watch(self.handover)
        self.guard = guard.watch(self.handover, self.optimizer, ema=self.ema)
        self.taken = []

    def run(self, begin=0, end=None):
        for x, y in self.batches[begin:end]:
            loss = F.cross_entropy(self.model(x), y) + self.handover.aux_loss()
            loss.backward()
            if taken := self.guard(loss):
                self.optimizer.step()
                if self.ema is not None:
                    self.ema.update()
            self.taken.append(taken)
            self.optimizer.zero_grad()
            self.handover.step()
        return self


@pytest.mark.parametrize("how", ["huge", "nan"])
@pytest.mark.parametrize("plan", [HALF, FALLING], ids=["half", "falling"])
def test_a_loop_of_ones_own_is_guarded_as_fit_is(plan, how):
    batches = poisoned(BAD, how=how)
    loop = Loop(plan, batches, ema=segue.Ema(decay=0.9)).run()
    model = Net()
    made = recipe(weight_decay=0.0, clip=None, ema=segue.Ema(decay=0.9))
    fitted = fit(model, plan, batches, recipe=made)
    assert loop.taken == [step != BAD for step in range(STEPS)]
    assert loop.guard.events == fitted.events
    assert loop.handover.raised == fitted.handover.raised != {}
    assert same_state(loop.model.state_dict(), model.state_dict())
    assert loop.optimizer.param_groups[0]["lr"] == 1e-3
    assert loop.ema.steps == STEPS - 1 - (BAD - KEPT)


@pytest.mark.parametrize("stop", [BAD - 1, BAD + 1])
def test_a_guarded_loop_resumes_bit_for_bit_before_and_after_a_restore(stop, tmp_path):
    torch.manual_seed(3)
    whole = Loop(FALLING, poisoned(BAD), dropout=0.2).run()
    torch.manual_seed(3)
    first = Loop(FALLING, poisoned(BAD), dropout=0.2).run(end=stop)
    segue.save(first.handover, tmp_path / "run", optimizer=first.optimizer)
    torch.save(first.guard.state_dict(), tmp_path / "guard.pt")
    torch.manual_seed(4)
    second = Loop(FALLING, poisoned(BAD), resume=tmp_path / "run", dropout=0.2)
    second.guard.load_state_dict(torch.load(tmp_path / "guard.pt"))
    second.run(begin=stop)
    assert second.guard.events == whole.guard.events
    assert same_state(second.model.state_dict(), whole.model.state_dict())


@pytest.mark.parametrize("order", ["rates first", "guard first"])
def test_a_phase_and_a_guard_decide_the_rate_together(order):
    phases = (Phase(name="a", length=0.75, lr=0.5, decay="constant", schedule=lambda *_: 0.5), Phase(name="b"))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    handover = segue.replace_(model, segue.Plan(sites="0", phases=phases), total_steps=8)
    optimizer, seen = torch.optim.SGD(handover.parameters(), lr=0.25), []
    if order == "rates first":
        handover.schedule_rates(optimizer)
    guard = segue.Guard(slowdown=0.5, recovery=4).watch(handover, optimizer)
    handover.schedule_rates(optimizer)
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
    for step in range(8):
        loss = model(torch.randn(4, 3)).sum() * (float("nan") if step == 1 else 1.0)
        loss.backward()
        if guard(loss):
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.25
        optimizer.zero_grad()
        handover.step()
    assert seen == [0.5, *(0.5 * factor for factor in (0.5, 0.625, 0.75, 0.875)), 0.25, 0.25]


def test_a_guard_of_a_run_without_a_length_is_refused():
    handover = segue.replace_(model := Net(), HALF)
    with pytest.raises(HandoverError, match="a guard needs total_steps"):
        GUARD.watch(handover, torch.optim.SGD(model.parameters()))


def test_retries_of_a_loop_are_bounded():
    with pytest.raises(TrainingError, match="resume from your last checkpoint; lower lr"):
        Loop(HALF, poisoned(*range(BAD, STEPS), how="nan")).run()
