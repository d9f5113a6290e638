"""Buffers of a step that is skipped: they stay as they were, and only what modules update is copied."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import segue
from segue.training.buffers import StepBuffers
from segue.training.tasks import Classification
from tests.helpers.tiny import SITES, Net, batch, same_state
from tests.training.fit_cases import CountedBatches

BROKEN = 3  # the step that is skipped
STEPS = 6


class Updating(nn.Module):
    """A module that updates its buffers in every forward, in one of the ways people write it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(8), persistent=how != "not persistent")
        self.register_buffer("newest", None)

    def forward(self, x):
        now = x.detach().mean((0, 1))
        if self.how == "assigned":
            self.mean = 0.9 * self.mean + 0.1 * now
        elif self.how == "data":
            self.mean.data.mul_(0.9).add_(now, alpha=0.1)
        elif self.how == "from none":
            self.newest = now
        elif self.how == "new":
            self.register_buffer(f"seen_{len(self._buffers)}", now)
        else:
            self.mean.mul_(0.9).add_(now, alpha=0.1)
        return x


class Normed(nn.Module):
    """Batch norm over the features of (batch, tokens, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class CentredLoss(nn.Module):
    """A loss with a running mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = Updating("in place")

    def forward(self, model, batch):
        return F.cross_entropy(model(self.centre(batch[0])), batch[1])


def containing(module: nn.Module, place: str = "mlp") -> Net:
    model = Net()
    block = model.blocks[1]
    setattr(block, place, nn.Sequential(getattr(block, place), module))
    return model


def half(**settings) -> segue.Plan:
    return segue.Plan(sites=SITES, schedule=segue.schedules.Constant(alpha=0.5), **settings)


UPDATES = {
    "batch norm": lambda: {"model": containing(Normed())},
    "batch norm of students": lambda: {"plan": half(student=lambda teacher, site: Normed())},
    "batch norm around the sites": lambda: {"model": containing(Normed()), "plan": half(train="all")},
    "batch norm, accumulated": lambda: {"model": containing(Normed()), "accumulate": 2},
    "in place": lambda: {"model": containing(Updating("in place"))},
    "assigned": lambda: {"model": containing(Updating("assigned"))},
    "through .data": lambda: {"model": containing(Updating("data"))},
    "from None": lambda: {"model": containing(Updating("from none"))},
    "registered in the forward": lambda: {"model": containing(Updating("new"))},
    "not persistent": lambda: {"model": containing(Updating("not persistent"))},
    "of a frozen backbone": lambda: {"model": containing(Updating("in place")), "plan": half()},
    "of a teacher": lambda: {"model": containing(Updating("data"), "attn"), "plan": half()},
    "of a loss": lambda: {"loss": CentredLoss()},
}


@pytest.mark.parametrize("case", UPDATES)
def test_a_skipped_step_changes_no_buffer(case):
    settings = {"model": Net(), "plan": None, "accumulate": 1, "loss": Classification(), **UPDATES[case]()}
    model, loss, accumulate = settings["model"], settings["loss"], settings["accumulate"]
    batches = CountedBatches(count=STEPS * accumulate).batches
    batches[BROKEN * accumulate][0][1, 2, 3] = math.nan
    states = []

    def buffers():
        owners = [model, *([loss] if isinstance(loss, nn.Module) else [])]
        named = [pair for owner in owners for pair in owner.named_buffers() if "student_" not in pair[0]]
        return {f"{place} {name}": value.clone() for place, (name, value) in enumerate(named)}

    class Watched(type(loss)):
        def __call__(self, model, batch):
            states.append(buffers())
            return super().__call__(model, batch)

    loss.__class__ = Watched
    recipe = segue.Recipe(steps=STEPS, on_nan="skip", accumulate=accumulate)
    fitted = segue.fit(model, settings["plan"], batches, loss, recipe=recipe, progress=None)
    assert fitted.skipped == 1
    states = [*states[::accumulate], buffers()]
    same = [same_state(*pair) for pair in itertools.pairwise(states)]
    assert same == [step == BROKEN for step in range(STEPS)]
    assert all(bool(torch.isfinite(value).all()) for value in states[-1].values())


def test_only_the_buffers_that_modules_update_are_copied_after_the_first_step():
    model = nn.Sequential(containing(Normed()), nn.Identity())
    model[1].register_buffer("table", torch.zeros(1000))
    statistics, buffers, copied = 2 * 8 * 4 + 8, StepBuffers([model]), []
    for _ in range(6):
        buffers.keep()
        copied.append(buffers.copied)
        model(batch(0)[0])
    assert copied == [statistics + 4000, *[statistics] * 5]
    model[1].table.data.add_(1.0)  # without a new version: noticed when values are compared again, before step 8
    for _ in range(3):
        buffers.keep()
        copied.append(buffers.copied)
    assert copied[6:] == [statistics, statistics, statistics + 4000]
    model[1].table.data.add_(1.0)
    buffers.restore()
    assert set(model[1].table.tolist()) == {1.0}


def test_what_is_constant_is_not_written_when_a_step_is_skipped():
    model = nn.Identity()
    model.register_buffer("mask", torch.zeros(1, 4).expand(3, 4))  # cannot be written to
    buffers = StepBuffers([model])
    buffers.keep()
    buffers.restore()
    assert model.mask._version == 0


def test_conjugate_views_are_kept_and_compared():
    model = nn.Identity()
    model.register_buffer("roots", torch.tensor([1 + 2j, 3 - 4j]).conj())
    buffers = StepBuffers([model])
    buffers.keep()
    buffers.keep()
    model.roots.mul_(2)
    buffers.restore()
    assert model.roots.tolist() == [1 - 2j, 3 + 4j]


def test_the_buffers_of_a_released_teacher_are_not_kept_alive():
    model = nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8))
    buffers = StepBuffers([model])
    buffers.keep()
    del model[0]
    assert len(buffers._kept) == 1


def test_nothing_is_copied_when_a_step_that_is_not_finite_stops_the_training(monkeypatch):
    monkeypatch.setattr(StepBuffers, "keep", lambda self: pytest.fail("copied"))
    recipe = segue.Recipe(steps=2)
    assert segue.fit(containing(Normed()), None, CountedBatches(), Classification(), recipe=recipe, progress=None).skipped == 0
