"""Weights that an optimizer step breaks: never saved, never returned."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import segue
from segue.checkpoint.state import saved_step
from segue.errors import TrainingError
from segue.training.distributed import Processes
from segue.training.recipe import Recipe
from segue.training.tasks import Classification
from segue.training.weights import FiniteWeights, _not_finite
from tests.helpers.tiny import SITES, Net, batch
from tests.training.fit_cases import CountedBatches, fit

HALF = segue.Plan(sites=SITES, schedule=segue.schedules.Constant(alpha=0.5))
CPU = Processes(torch.device("cpu"))


class Breaking(Recipe):
    """A recipe whose optimizer, after some steps, gets a moment that is NaN."""

    def optimizer(self, named):
        named = list(named)
        optimizer = super().optimizer(named)
        target = next(parameter for name, parameter in named if name == BROKEN)
        taken = []

        def before(*_):
            taken.append(1)
            if len(taken) == AT:
                optimizer.state[target]["exp_avg"].fill_(math.nan)

        optimizer.register_step_pre_hook(before)
        return optimizer


BROKEN, AT, STEPS = "blocks.1.attn.proj.weight", 6, 6


@pytest.mark.parametrize("plan", [None, HALF], ids=["plain", "handover"])
@pytest.mark.parametrize("folder", [False, True])
def test_a_weight_that_the_last_step_breaks_is_named_and_the_last_good_checkpoint_stays(plan, folder, tmp_path):
    place = {"folder": tmp_path / "run", "checkpoint_every": 2} if folder else {}
    with pytest.raises(TrainingError) as caught:
        fit(Net(), plan, recipe=Breaking(steps=STEPS), **place)
    wrong, found, hint = str(caught.value).splitlines()
    assert wrong == f"'{BROKEN}' is inf or NaN after 6 of 6 steps."
    assert "It is a weight" in found
    assert ("of the student at site 'blocks.1.attn'" in found) == (plan is not None)
    if folder:
        assert f"the last good checkpoint is {tmp_path / 'run'}" in hint
        assert saved_step(tmp_path / "run" / "checkpoints") == 4
        again = fit(Net(), plan, recipe=Recipe(steps=STEPS), resume=True, **place)
        assert all(bool(torch.isfinite(p).all()) for p in again.model.parameters())
    else:
        assert "there is no checkpoint" in hint


def test_a_weight_that_no_loss_notices_is_found_before_the_next_checkpoint(tmp_path):
    class Spare(Net):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(2, 2)

    def loss(model, batch):
        broken = len(seen) == 3
        seen.append(0)
        if broken:
            with torch.no_grad():
                model.spare.bias.fill_(math.inf)
        return F.cross_entropy(model(batch[0]), batch[1])

    seen: list = []
    with pytest.raises(TrainingError, match=r"'spare.bias' is inf or NaN after 4 of 6 steps"):
        fit(Spare(), None, loss=loss, steps=STEPS, folder=tmp_path / "run", checkpoint_every=2)
    assert saved_step(tmp_path / "run" / "checkpoints") == 2


def test_zero_eps_with_a_zero_gradient_is_found():
    model = Net()
    model.blocks.requires_grad_(False)
    model.head.weight.register_hook(torch.zeros_like)
    with pytest.raises(TrainingError, match=r"'head.weight' is inf or NaN after 1 of 1 steps"):
        fit(model, recipe=Recipe(steps=1, eps=0.0))


def test_a_buffer_that_training_breaks_is_named_and_one_that_was_infinite_is_not():
    class Masked(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.full((5,), -math.inf))
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            if self.training and self.breaks:
                self.mean /= 0.0
            return super().forward(x)

    model = Masked()
    model.breaks = False
    fit(model, HALF, steps=2)
    model = Masked()
    model.breaks = True
    with pytest.raises(TrainingError, match=r"'mean' is inf or NaN after 1 of 2 steps.\n  It is a buffer of the backbone"):
        fit(model, HALF, steps=2)


def test_a_mask_that_the_model_makes_while_it_trains_is_not_broken():
    class Caching(Net):
        def forward(self, x):
            if not hasattr(self, "mask"):
                self.register_buffer("mask", torch.full((5, 5), -math.inf).triu(1), persistent=False)
            return super().forward(x)

    assert fit(Caching(), steps=2).skipped == 0
    model = Net()
    weights = FiniteWeights(model, None, CPU)
    with torch.no_grad():
        model.head.bias.zero_()[0] = -math.inf  # like a mask, but it trains
    with pytest.raises(TrainingError, match=r"'head.bias' is inf or NaN"):
        weights.require(1, 2, None)


@pytest.mark.parametrize("name", ["blocks.0.norm.bias", "unused"])
def test_a_frozen_weight_that_was_broken_before_is_named_if_it_makes_every_step_skipped(name):
    model = Net()
    model.register_buffer("unused", torch.ones(3))
    model.register_buffer("mask", torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf))
    with torch.no_grad():
        {**dict(model.named_parameters()), "unused": model.unused}[name][0] = math.nan
    skip = Recipe(steps=2, on_nan="skip")
    if name == "unused":
        assert fit(model, HALF, recipe=skip).skipped == 0
        return
    with pytest.raises(TrainingError, match=f"'{name}' is inf or NaN after 1 of 2 steps") as caught:
        fit(model, HALF, recipe=skip)
    assert "It is a weight of the backbone, and was so before: every step is skipped; nothing" in str(caught.value)
    batches = CountedBatches().batches
    batches[0][0][:] = math.nan
    model = Net()
    model.register_buffer("mask", torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf))
    assert fit(model, HALF, batches, recipe=skip).skipped == 1  # the mask is not to blame


def test_a_checkpoint_that_an_earlier_version_wrote_with_a_broken_weight_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(FiniteWeights, "require", lambda *_, **__: None)
        fit(Net(), None, recipe=Breaking(steps=STEPS), folder=tmp_path)
    with pytest.raises(TrainingError, match=f"'{BROKEN}' is inf or NaN after 6 of 6 steps"):
        fit(Net(), None, recipe=Recipe(steps=STEPS), folder=tmp_path, resume=True)


def test_teachers_and_spans_have_their_original_and_finished_names():
    model = Net()
    plan = segue.Plan(sites=segue.Span("blocks", every=2, last=1), student=lambda teacher, site: nn.Linear(8, 8))
    handover = segue.replace_(model, plan, total_steps=2)
    weights = FiniteWeights(model, handover, CPU)
    with torch.no_grad():
        model.blocks[2].norm.bias[0] = math.nan
    with pytest.raises(TrainingError, match=r"'blocks.1.norm.bias' is inf or NaN .*\n  It is a weight of the backbone;"):
        weights.require(1, 2, None)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.float8_e5m2, torch.float8_e4m3fnuz]
)
def test_every_kind_of_number_is_checked(dtype):
    numbers = [torch.ones(3, 2), torch.zeros(0), torch.tensor([1.0, math.nan]), torch.tensor(-math.inf), torch.full((2,), 3e38)]
    cast = [tensor.to(dtype) for tensor in numbers]
    large = not bool(torch.isfinite(cast[-1].to(torch.complex128)).all())  # in float8
    assert _not_finite(cast, torch.device("cpu")).tolist() == [0, 0, 1, 1, float(large)]


def test_a_good_training_is_not_disturbed():
    assert fit(Net(), HALF, batches=CountedBatches(), loss=Classification(), validation=[batch(3)]).skipped == 0
