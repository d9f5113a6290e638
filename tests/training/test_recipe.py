"""The recipe: how long, how fast, and what decays."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from segue.errors import ConfigError, SegueWarning
from segue.training.recipe import Recipe
from tests.helpers.tiny import Net
from tests.training.fit_cases import fit


def test_the_defaults_are_the_settings_of_the_papers_appendix():
    recipe = Recipe(epochs=50)
    assert (recipe.lr, recipe.weight_decay, recipe.clip) == (5e-4, 0.05, 1.0)
    assert (recipe.betas, recipe.eps) == ((0.9, 0.999), 1e-8)
    assert (recipe.decay, recipe.final_lr, recipe.accumulate, recipe.on_nan) == ("cosine", 0.0, 1, "stop")


def by_hand(step: int, *, total: int, rise: int, lr: float, final: float) -> float:
    if step < rise:
        return lr / rise * (step + 1)
    angle = math.pi * (step - rise) / (total - rise)
    return final + (lr - final) * (1 + math.cos(angle)) / 2


@pytest.mark.parametrize(
    ("total", "warmup", "rise", "final"), [(36, 2 / 6, 12, 1e-6), (40, 0.05, 2, 0.0), (7, 0.0, 0, 1e-3), (10, 0.34, 3, 0.0)]
)
def test_the_rate_rises_in_a_straight_line_and_falls_as_half_a_cosine(total, warmup, rise, final):
    recipe = Recipe(steps=total, lr=1e-2, final_lr=final, warmup=warmup)
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = recipe.optimizer([("weight", weight), ("bias", nn.Parameter(torch.ones(2)))])
    for step in range(total + 1):
        recipe.set_rate(optimizer, step, total)
        wanted = by_hand(step, total=total, rise=rise, lr=1e-2, final=final)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([wanted, wanted], rel=1e-12, abs=1e-18), step
        assert recipe.rate(step, total) == pytest.approx(wanted, rel=1e-12, abs=1e-18), step


def test_a_constant_rate_stays_after_its_warm_up():
    recipe = Recipe(steps=10, lr=0.4, warmup=0.2, decay="constant")
    assert [recipe.rate(step, 10) for step in range(4)] == [0.2, 0.4, 0.4, 0.4]
    assert recipe.rate(10, 10) == 0.4


def test_a_warm_up_may_fill_the_whole_run():
    recipe = Recipe(steps=4, lr=0.4, warmup=1.0)
    assert [recipe.rate(step, 4) for step in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_matrices_decay_and_biases_and_norms_do_not():
    model = nn.Sequential(Net(), nn.BatchNorm1d(3), nn.Conv1d(3, 3, 1), nn.Embedding(4, 3))
    optimizer = Recipe(steps=1, weight_decay=0.3, betas=(0.8, 0.99), eps=1e-7).optimizer(model.named_parameters())
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for name, module in model.named_modules():
        plain = isinstance(module, nn.LayerNorm | nn.BatchNorm1d)
        for kind, parameter in module.named_parameters(recurse=False):
            assert decay[id(parameter)] == (0.0 if plain or kind == "bias" else 0.3), f"{name}.{kind}"
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.8, 0.99), 1e-7)


def test_a_model_of_biases_alone_has_one_group():
    optimizer = Recipe(steps=1).optimizer([("bias", nn.Parameter(torch.ones(3)))])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0]


@pytest.mark.parametrize(
    ("recipe", "per_epoch", "total"),
    [
        (Recipe(steps=7), None, 7),
        (Recipe(epochs=2), 5, 10),
        (Recipe(epochs=0.5), 5, 2),
        (Recipe(epochs=2, accumulate=3), 5, 3),
        (Recipe(epochs=0.01), 5, 1),
    ],
    ids=["steps", "epochs", "half an epoch", "accumulated", "at least one"],
)
def test_steps_are_counted(recipe, per_epoch, total):
    counted = recipe.total_steps(per_epoch)
    assert counted == total
    assert isinstance(counted, int)


def test_epochs_need_batches_that_can_be_counted():
    with pytest.raises(ConfigError, match="the number of steps in 2 epochs is unknown") as caught:
        Recipe(epochs=2).total_steps(None)
    assert "Hint: give Recipe(steps=...) instead." in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "Recipe(steps=None, epochs=None) is not valid."),
        ({"steps": 3, "epochs": 1}, "Recipe(steps=3, epochs=1) is not valid."),
        ({"steps": 0}, "Recipe(steps=...) must be a positive integer, got 0."),
        ({"steps": 2.5}, "Recipe(steps=...) must be a positive integer, got 2.5."),
        ({"epochs": float("nan")}, "Recipe(epochs=...) must be a positive finite number, got nan."),
        ({"steps": 3, "lr": -1.0}, "Recipe(lr=...) must be a positive finite number or a Rates, got -1.0."),
        ({"steps": 3, "clip": 0.0}, "Recipe(clip=...) must be a positive finite number, got 0.0."),
        ({"steps": 3, "accumulate": 1.5}, "Recipe(accumulate=...) must be a positive integer, got 1.5."),
        ({"steps": 3, "weight_decay": math.inf}, "Recipe(weight_decay=...) must be a finite number of at least 0, got inf."),
        ({"steps": 3, "warmup": 1.5}, "Recipe(warmup=...) must be a number from 0 to 1, got 1.5."),
        ({"steps": 3, "decay": "linear"}, "The choices are 'cosine' and 'constant'."),
        ({"steps": 3, "precision": "fp8"}, "The choices are 'float32', 'bf16' and 'fp16'."),
        ({"steps": 3, "on_nan": "ignore"}, "The choices are 'stop' and 'skip'."),
        ({"steps": 3, "compile": "no"}, "Recipe(compile=...) must be True or False, got 'no'."),
        ({"steps": 3, "betas": (0.9, 1.0)}, "In it, item 1 is 1.0, of type float."),
        ({"steps": True}, "Recipe(steps=...) must be a positive integer, got True."),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(settings, text):
    with pytest.raises(ConfigError) as caught:
        Recipe(**settings)
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("found", "warns"), [({"avx512_bf16": True}, False), ({"avx2": True}, True), ({"sve_bf16": True}, False)]
)
def test_bf16_without_units_for_it_warns(found, warns, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    expected = pytest.warns(SegueWarning, match="no bf16 units") if warns else nullcontext()
    with expected:
        fit(Net(), None, recipe=Recipe(steps=1, precision="bf16"), evaluations=0)
    fit(Net(), None, recipe=Recipe(steps=1), evaluations=0)  # float32 never does
