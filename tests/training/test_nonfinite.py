"""Non-finite values in training: the place is named, or the step is skipped."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import segue
from segue.checkpoint.state import saved_step
from segue.errors import TrainingError
from segue.training.tasks import Classification
from tests.helpers.tiny import SITES, Net, batch, same_state
from tests.training.fit_cases import CountedBatches

BROKEN = 3  # the step at which numbers break


class Student(nn.Module):
    """A student that breaks on request, in its output or in a gradient, at a step of its own."""

    def __init__(self, place: str, broken: str | None) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.root = nn.Parameter(torch.ones(1))
        self.broken = broken
        self.forwards = 0
        self.place = place

    def forward(self, x):
        y = self.inner(x)
        if not self.training:
            return y
        breaks = self.forwards == BROKEN
        if torch.is_grad_enabled():
            self.forwards += 1
        elif self.forwards == BROKEN + 1:
            breaks = True  # the forward that searches for the place
        if not breaks or self.broken is None:
            return y
        if self.broken == "output":
            return y / 0.0
        if self.broken == "gradient":  # of what came before it, too
            return y + 0.0 * (y - y.detach()).sqrt()
        assert self.broken == "own gradient"  # of one parameter alone
        return y + 0.0 * (self.root - self.root.detach()).sqrt()


def plan(**broken: str) -> segue.Plan:
    def student(teacher, site):
        return Student(site.name, broken.get(site.name.split(".")[1]))

    return segue.Plan(sites=SITES, student=student, schedule=segue.schedules.Constant(alpha=0.5))


class Breaking(Classification):
    """A loss that is NaN at a step, for no reason of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def __call__(self, model, batch):
        loss = super().__call__(model, batch)
        if torch.is_grad_enabled():
            self.step += 1
        return loss * (math.nan if self.step == BROKEN + 1 else 1.0)


def broken_batches(value=math.nan, at=BROKEN):
    batches = CountedBatches(count=6).batches
    batches[at][0][1, 2, 3] = value
    return batches


def fit(model=None, plan=None, batches=None, loss=None, **recipe):
    more = {name: recipe.pop(name) for name in ("folder", "checkpoint_every", "evaluations", "validation") if name in recipe}
    settings = {"steps": 6, "lr": 1e-2, "clip": 1.0, **recipe}
    return segue.fit(
        model or Net(),
        plan,
        CountedBatches() if batches is None else batches,
        loss or Classification(),
        recipe=segue.Recipe(**settings),
        progress=None,
        **more,
    )


WHERE = {
    "batch, NaN": ({"batches": broken_batches()}, "The batch itself contains inf or NaN"),
    "batch, inf": ({"batches": broken_batches(math.inf)}, "The batch itself contains inf or NaN"),
    "output at the second site": ({"plan": lambda: plan(**{"1": "output"})}, "The student's output at site 'blocks.1.attn'"),
    "output at two sites": ({"plan": lambda: plan(**{"1": "output", "2": "output"})}, "output at site 'blocks.1.attn'"),
    "gradient of one parameter": (
        {"plan": lambda: plan(**{"1": "own gradient"})},
        "The gradient of 'blocks.1.attn.root' is inf or NaN, at site 'blocks.1.attn'",
    ),
    "gradient that spreads": ({"plan": lambda: plan(**{"1": "gradient"})}, "is inf or NaN, at site 'blocks.1.attn'"),
    "loss": ({"plan": plan, "loss": Breaking}, "The outputs at the sites are finite; the loss is not"),
    "loss of a plain model": ({"loss": Breaking}, "the loss is not"),
}


@pytest.mark.parametrize("case", WHERE)
def test_the_place_the_step_and_the_last_good_checkpoint_are_named(case, tmp_path):
    settings, words = WHERE[case]
    settings = {name: value() if callable(value) else value for name, value in settings.items()}
    with pytest.raises(TrainingError) as caught:
        fit(folder=tmp_path / "run", checkpoint_every=2, **settings)
    asked, found, hint = str(caught.value).splitlines()
    assert asked.startswith(f"step {BROKEN} has no finite update: loss ")
    assert words in found
    assert f"the last good checkpoint is {tmp_path / 'run'}" in hint
    assert "Recipe(on_nan='skip')" in hint
    assert saved_step(tmp_path / "run" / "checkpoints") == 2


def test_a_weight_that_was_broken_before_is_named_with_its_site():
    model = Net()
    with torch.no_grad():
        model.blocks[2].mlp[0].bias[0] = math.inf
    with pytest.raises(TrainingError, match="The weight 'blocks.2.mlp.0.bias' is inf or NaN") as caught:
        fit(model, plan())
    assert "at site" not in str(caught.value)
    assert "there is no checkpoint (give fit a folder)" in str(caught.value)

    def broken(teacher, site):
        student = Student(site.name, None)
        with torch.no_grad():
            student.inner.weight[0, 0] = math.nan if site.index == 1 else 0.0
        return student

    with pytest.raises(TrainingError, match="The weight 'blocks.1.attn.inner.weight' is inf or NaN, at site 'blocks.1.attn'"):
        fit(Net(), segue.Plan(sites=SITES, student=broken, schedule=segue.schedules.Constant(alpha=0.5)))


def test_any_batch_of_an_accumulated_step_may_be_the_broken_one():
    for at in (2, 3):
        with pytest.raises(TrainingError, match="step 1 has no finite update") as caught:
            fit(batches=broken_batches(at=at), accumulate=2)
        assert "The batch itself contains inf or NaN" in str(caught.value)
    small, large = torch.ones(4, 8), torch.full((4, 8), 100.0)  # whose exponential is too large for float32
    for inputs in ([small, small, large, small], [small, small, small, large]):
        with pytest.raises(TrainingError, match="The student's output at site '1' is inf or NaN"):
            fit(
                nn.Sequential(nn.Identity(), nn.Linear(8, 8), nn.Linear(8, 3)),
                segue.Plan(sites="1", student=lambda teacher, site: Exponential(8, 8)),
                [(x, torch.tensor([0, 1, 2, 0])) for x in inputs],
                accumulate=2,
            )


class Exponential(nn.Linear):
    def forward(self, x):
        return super().forward(x) * x.exp()


STEPS_LEFT_OUT = {
    "batch": lambda: {"batches": broken_batches()},
    "output": lambda: {"plan": plan(**{"1": "output"})},
    "gradient": lambda: {"plan": plan(**{"1": "own gradient"})},
    "loss": lambda: {"plan": plan(), "loss": Breaking()},
    "loss, guided": lambda: {"plan": segue.methods.dcr_dfg(sites=SITES), "loss": Breaking()},
    "loss, plain": lambda: {"loss": Breaking()},
}


@pytest.mark.parametrize("case", STEPS_LEFT_OUT)
def test_a_step_that_is_left_out_changes_no_weight_and_is_counted(case):
    settings = STEPS_LEFT_OUT[case]()
    loss = settings.pop("loss", None) or Classification()
    states = []

    def watched(model, batch):
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        return loss(model, batch)

    fitted = fit(loss=watched, on_nan="skip", evaluations=6, **settings)
    states.append(fitted.model.state_dict())
    assert fitted.skipped == 1
    assert [point["step"] for point in fitted.history] == list(range(7))
    assert fitted.history[BROKEN + 1]["loss"] is None  # no good step since the last evaluation
    assert all(math.isfinite(point["loss"]) for point in fitted.history[1:] if point["step"] != BROKEN + 1)
    assert [same_state(*pair) for pair in itertools.pairwise(states)] == [step == BROKEN for step in range(6)]
    assert fitted.handover is None or fitted.handover.steps_done == 6


def test_the_very_first_step_may_be_left_out_and_every_step_too():
    assert fit(batches=broken_batches(at=0), on_nan="skip").skipped == 1
    model = Net()
    batches = [(x * math.nan, y) for x, y in CountedBatches()]
    fitted = fit(model, segue.methods.dcr(sites=SITES), batches, on_nan="skip", validation=[batch(9)])
    assert fitted.skipped == 6
    assert fitted.history[-1]["loss"] is None


def test_what_was_left_out_is_remembered_by_a_resumed_run(tmp_path):
    fit(batches=broken_batches(), on_nan="skip", folder=tmp_path)
    again = segue.fit(
        Net(),
        None,
        CountedBatches(),
        Classification(),
        recipe=segue.Recipe(steps=6),
        folder=tmp_path,
        resume=True,
        progress=None,
    )
    assert again.skipped == 1


def test_a_huge_gradient_is_clipped_and_no_reason_to_stop():
    fitted = fit(loss=lambda model, batch: 1e12 * F.cross_entropy(model(batch[0]), batch[1]))
    assert fitted.skipped == 0
    assert all(bool(torch.isfinite(p).all()) for p in fitted.model.parameters())
