"""Calls that once were accepted, or ended in a foreign traceback, are refused in three lines and change nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import segue
from segue import losses, schedules, students
from segue.errors import ConfigError, HandoverError, PlanError, SegueError
from tests.helpers.tiny import SITES, Net, batch
from tests.torture.wrong_calls import fingerprint

BATCHES = [batch(0, 2), batch(1, 2)]


def plan(**settings: Any) -> segue.Plan:
    return segue.Plan(**{"sites": SITES, **settings})


def fit(**settings: Any) -> Any:
    given = {"loss_fn": segue.Classification(), "recipe": segue.Recipe(steps=2), "progress": None, **settings}
    return segue.fit(Net(), plan(), BATCHES, **given)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: plan(release="no"), PlanError, "Plan(release=...) must be True or False, got 'no'."),
        (lambda: segue.Recipe(steps=2, compile="no"), ConfigError, "Recipe(compile=...) must be True or False, got 'no'."),
        (lambda: fit(evaluations="x"), ConfigError, "fit(evaluations=...) must be an integer of at least 0 or a sequence"),
        (lambda: fit(evaluations=[1, 1.5]), ConfigError, "In it, item 1 is 1.5, of type float."),
        (lambda: fit(checkpoint_every=1.5), ConfigError, "fit(checkpoint_every=...) must be a positive integer, got 1.5."),
        (lambda: fit(checkpoint_every=0), ConfigError, "fit(checkpoint_every=...) must be a positive integer, got 0."),
        (lambda: fit(checkpoint_every=-1), ConfigError, "fit(checkpoint_every=...) must be a positive integer, got -1."),
        (lambda: fit(loss_fn=segue.Classification), ConfigError, "call the class to make one: Classification()."),
        (lambda: fit(loss_fn=lambda model, batch: "x"), ConfigError, "loss_fn must return a scalar tensor."),
        (lambda: fit(loss_fn=lambda model: 0.0), ConfigError, "It does not take 2 arguments."),
        (lambda: fit(measure=lambda handover: "x"), ConfigError, "measure must return a dictionary, got str."),
        (lambda: fit(measure=lambda handover: {"x": torch.ones(2)}), ConfigError, "Object of type Tensor is not JSON"),
        (lambda: fit(validation=BATCHES, scores=lambda m, b: 3), ConfigError, "scores must return a dictionary, got int."),
        (
            lambda: fit(validation=BATCHES, scores=lambda m, b: {"a": 3}),
            ConfigError,
            "the score 'a' must be a tensor, got int.",
        ),
        (lambda: schedules.Piecewise(points=((math.nan, 0.5),)), PlanError, "item 0 of item 0 is nan, of type float."),
        (lambda: students.register_attention(3, 3), PlanError, "register_attention(kind=...) must be a subclass of nn.Module"),
        (
            lambda: plan(student="Softmax"),
            PlanError,
            "Plan(student=...) must be a function (teacher, site) -> module, got 'Softmax'.",
        ),
        (lambda: plan(gate=None), PlanError, "Plan(gate=...) must be a function (alpha, noise) -> weight, got None."),
        (
            lambda: plan(schedule="linear"),
            PlanError,
            "Plan(schedule=...) must be a function (progress, site) -> alpha, got 'linear'.",
        ),
        (lambda: losses.FeatureGuidance(weight="1"), PlanError, "must be a finite number of at least 0, got '1'."),
        (lambda: segue.replace_(Net(), plan(), total_steps="9"), PlanError, "replace_(total_steps=...) must be a positive"),
        (lambda: segue.replace_(Net(), plan(), example="x"), PlanError, "the model cannot be called with the example."),
        (lambda: segue.replace_(Net(), plan(student=nn.Linear(3, 3))), PlanError, "It does not take 2 arguments."),
    ],
    ids=range(23),
)
def test_nonsense_is_refused_in_three_lines(call, error, says):
    with pytest.raises(error) as caught:
        call()
    assert says in str(caught.value)
    assert len(caught.value.args) == 3


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda handover: handover.finalize_(force="no"), HandoverError),
        (lambda handover: handover.aux_loss("no"), HandoverError),
        (lambda handover: handover.verify(batch()[0], optimizer="adam"), HandoverError),
        (lambda handover: handover.calibrate(3), HandoverError),
        (lambda handover: segue.save(handover, 3), SegueError),
    ],
    ids=["finalize_", "aux_loss", "verify", "calibrate", "save"],
)
def test_a_running_handover_is_left_as_it_is(call, error):
    handover = segue.replace_(Net().train(), plan(), total_steps=4)
    before = fingerprint(handover)
    with pytest.raises(error, match="must be"):
        call(handover)
    assert fingerprint(handover) == before


@pytest.mark.parametrize(
    ("guidance", "says"),
    [
        (lambda t, s, mask: None, "It returns None."),
        (lambda t, s, mask: "x", "It returns 'x'."),
        (lambda t, s, mask: (t - s).square(), "It returns a tensor of shape"),
    ],
    ids=["None", "a string", "no scalar"],
)
def test_a_guidance_returns_a_number(guidance, says):
    handover = segue.replace_(Net().train(), plan(guidance=guidance), total_steps=4)
    handover.model(batch()[0])
    with pytest.raises(PlanError, match="the guidance loss must return a scalar") as caught:
        handover.aux_loss()
    assert says in str(caught.value)


def test_an_exception_of_a_users_own_function_arrives_as_it_is():
    def loss_fn(model, examples):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(loss_fn=loss_fn)
