"""A training that fails or is stopped: the model is as it was before, bit for bit."""

import copy
import gc
import io
import os
import signal
import weakref

import pytest
import torch
from torch import nn

import segue
from segue.errors import ConfigError, HandoverError, SegueWarning, TrainingError
from segue.training.recipe import Recipe
from segue.training.tasks import Classification
from segue.training.undo import PREFIX, Released
from tests.helpers.tiny import SITES, Net, batch
from tests.torture.wrong_calls import fingerprint
from tests.training.fit_cases import CountedBatches, fit

STEPS = 6
SOON = segue.schedules.Linear(until=0.4)  # takeover at step 3


class Counting(nn.Module):
    """Batch norm and a count of forwards, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("forwards", torch.zeros(()), persistent=False)
        self.register_buffer("seen", None)

    def forward(self, x):
        self.forwards += 1
        self.seen = x.detach().mean()
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def mixed_model() -> Net:
    """Make a model with modules in both modes, parameters that train and that do not, statistics, and a shared layer."""
    model = Net(dropout=0.1)
    model.blocks[1].mlp = nn.Sequential(Counting(), model.blocks[1].mlp)
    model.blocks[2].attn = nn.Sequential(model.blocks[2].attn, Counting())
    model.blocks[2].mlp = model.blocks[0].mlp
    model.blocks[0].norm.bias.requires_grad_(False)
    model.blocks[1].attn.proj.requires_grad_(False)
    model.eval()
    model.blocks[1].train()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    return model


def dull(teacher, site):
    return nn.Identity()


PLANS = {
    "plain": None,
    "frozen": segue.Plan(sites=SITES, schedule=SOON),
    "backbone in training": segue.Plan(sites=SITES, schedule=SOON, backbone="train"),
    "everything trains": segue.Plan(sites=SITES, schedule=SOON, train="all"),
    "released": segue.Plan(sites=SITES, schedule=SOON, release=True),
    "released, everything trains": segue.Plan(sites=SITES, schedule=SOON, release=True, train="all"),
    "distilled": segue.methods.distillation(sites=SITES),
}


class Failing(Classification):
    """A loss that raises, or sends signals, at a certain step."""

    def __init__(self, step: int, how: str = "error", times: int = 1) -> None:
        super().__init__()
        self.left, self.how, self.times = step + 1, how, times

    def __call__(self, model, batch):
        self.left -= 1
        if self.left == 0 and self.how == "error":
            raise RuntimeError("the power failed")
        loss = super().__call__(model, batch)
        if self.left == 0:
            for _ in range(self.times):
                os.kill(os.getpid(), getattr(signal, self.how))
        return loss


class NoOptimizer(Recipe):
    def optimizer(self, named):
        raise ValueError("there is no such optimizer")


def stop(*_):
    raise RuntimeError("the power failed")


def late(metrics):
    if metrics["step"] == 5:
        raise RuntimeError("the power failed")


def with_nan():
    batches = CountedBatches(count=STEPS).batches
    batches[4][0][0, 0, 0] = torch.nan
    return batches


FAILURES = {
    "optimizer": (ValueError, lambda: {"recipe": NoOptimizer(steps=STEPS)}),
    "first forward": (RuntimeError, lambda: {"loss": Failing(0)}),
    "later forward": (RuntimeError, lambda: {"loss": Failing(5)}),
    "scores": (RuntimeError, lambda: {"scores": stop, "validation": [batch(1)]}),
    "evaluation": (RuntimeError, lambda: {"on_eval": late, "evaluations": STEPS}),
    "no more batches": (segue.errors.DataError, lambda: {"batches": iter(CountedBatches(count=4).batches)}),
    "a batch with NaN": (TrainingError, lambda: {"batches": with_nan()}),
    "SIGINT": (KeyboardInterrupt, lambda: {"loss": Failing(4, "SIGINT")}),
    "two SIGINTs": (KeyboardInterrupt, lambda: {"loss": Failing(4, "SIGINT", times=2)}),
    "SIGTERM": (SystemExit, lambda: {"loss": Failing(4, "SIGTERM")}),
    "SIGINT in the last step": (KeyboardInterrupt, lambda: {"loss": Failing(STEPS - 1, "SIGINT")}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_training_that_fails_or_is_stopped_leaves_the_model_as_it_was(plan, capsys):
    for case, (kind, settings) in FAILURES.items():
        model = mixed_model()
        before, gradient = fingerprint(model), model.head.weight.grad.clone()
        parameters = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
        with pytest.raises(kind):
            fit(model, PLANS[plan], **{"recipe": Recipe(steps=STEPS), **settings()})
        assert fingerprint(model) == before, case
        assert torch.equal(model.head.weight.grad, gradient), case
        assert all(p.grad is None for name, p in model.named_parameters() if name != "head.weight"), case
        if PLANS[plan] is None or not PLANS[plan].release:
            assert all(parameters[name]() is p for name, p in model.named_parameters()), case


REFUSED = {
    "a student without parameters": (HandoverError, {"plan": segue.Plan(sites=SITES, student=dull)}),
    "sites that do not exist": (segue.errors.SiteError, {"plan": segue.Plan(sites="blocks.*.atn")}),
    "a generator and epochs": (ConfigError, {"batches": iter([]), "recipe": Recipe(epochs=1)}),
    "a folder that is a file": (OSError, {"folder": __file__}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_leaves_the_model_as_it_was(case):
    kind, settings = REFUSED[case]
    model = mixed_model()
    before = fingerprint(model)
    with pytest.raises(kind):
        fit(model, **settings)
    assert fingerprint(model) == before


def test_a_span_that_was_released_comes_back():
    plan = segue.Plan(
        sites=segue.Span("blocks", every=2, last=1), student=lambda t, site: nn.Linear(8, 8), schedule=SOON, release=True
    )
    model = Net()
    before = fingerprint(model)
    with pytest.raises(RuntimeError, match="the power failed"):
        fit(model, plan, loss=Failing(5))
    assert fingerprint(model) == before


def test_released_teachers_leave_the_memory_and_their_files_go(tmp_path):
    model = Net()
    teacher = weakref.ref(model.blocks[1].attn)
    weight = weakref.ref(model.blocks[1].attn.proj.weight)
    seen = []

    def look(metrics):
        gc.collect()
        seen.append((teacher() is None, weight() is None, len(list(tmp_path.glob(f"{PREFIX}*/*")))))

    (tmp_path / f"{PREFIX}killed").mkdir(parents=True)
    fit(model, PLANS["released"], steps=STEPS, on_eval=look, evaluations=STEPS, folder=tmp_path)
    assert seen[2] == (False, False, 0)
    assert seen[-1] == (True, True, 3)
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_a_teacher_that_the_user_holds_is_itself_again():
    model = Net()
    held, weight = model.blocks[0].attn, model.blocks[1].attn.proj.weight
    before = fingerprint(model)
    with pytest.raises(RuntimeError, match="the power failed"):
        fit(model, PLANS["released"], loss=Failing(5))
    assert model.blocks[0].attn is held
    assert model.blocks[1].attn.proj.weight is weight
    assert fingerprint(model) == before


def test_a_teacher_that_cannot_be_written_stays_in_memory_and_that_is_said(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("segue.core.tensor_files.write", full)
    model = Net()
    before = fingerprint(model)
    with pytest.raises(RuntimeError, match="the power failed"), pytest.warns(SegueWarning, match="stays in memory"):
        fit(model, PLANS["released"], loss=Failing(5))
    assert fingerprint(model) == before


def test_what_a_teacher_refers_to_outside_of_itself_is_not_copied():
    class Listening(nn.Linear):
        owner: object = None

        def forward(self, x):
            return super().forward(x) + 0.0 * self.owner[0].head.bias.sum()

    model = Net()
    model.blocks[0].attn = Listening(8, 8)
    model.blocks[0].attn.owner = [model]
    with torch.no_grad():
        released = Released(model, None)
        released.keep("blocks.0.attn", model.blocks[0].attn)
        weight = model.blocks[0].attn.weight.clone()
        model.blocks[0].attn = nn.Identity()
        gc.collect()
        teacher = released.teacher("blocks.0.attn")
    assert teacher.owner[0] is model
    assert torch.equal(teacher.weight, weight)
    released.close()


def test_gradients_from_before_are_no_part_of_the_first_step():
    wanted, found = Net(), Net()
    for parameter in found.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    for model in (wanted, found):
        fit(model, steps=1)
    assert fingerprint(found) == fingerprint(wanted)


def test_a_copy_that_is_made_while_fit_keeps_released_teachers_does_not_keep_them(tmp_path):
    model, copies = Net(), []

    def on_eval(metrics):
        torch.save(model, file := io.BytesIO())
        with pytest.warns(SegueWarning, match="does not follow it"):
            copies.append((copy.deepcopy(model), file.getbuffer().nbytes))

    plan = segue.Plan(sites=SITES, schedule=SOON, release=True)
    fit(model, plan, steps=STEPS, folder=tmp_path, evaluations=[1, 5], on_eval=on_eval)
    assert len(copies) == 4
    assert copies[-1][1] < copies[0][1]  # its teachers are gone


def test_the_error_of_a_training_is_shown_also_when_the_models_own_code_has_removed_a_module():
    def loss(model, batch):
        del model.spare
        raise ValueError("the cause")

    model = Net()
    model.spare = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = model.head.weight.detach().clone()
    with pytest.raises(ValueError, match="the cause"):
        fit(model, loss=loss)
    assert torch.equal(model.head.weight, before)
