"""Non-finite values in training: the place is named, or the step is skipped."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import segue
from segue.checkpoint.state import saved_step
from segue.errors import TrainingError
from segue.training.tasks import Classification
from tests.helpers.tiny import SITES, Net, batch, same_state
from tests.training.fit_cases import CountedBatches

BROKEN = 3  # the step at which numbers break
HALF = segue.schedules.Constant(alpha=0.5)


class Clock(CountedBatches):
    """Batches that say which of them is being read, so that what breaks at a step breaks again when it is repeated."""

    now = 0

    def __iter__(self):
        for Clock.now, one in enumerate(self.batches):
            yield one


def breaks() -> bool:
    return Clock.now == BROKEN


class BadGradient(torch.autograd.Function):
    """The identity, with a gradient of NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


class Breaking(nn.Module):
    """A module that breaks at a step: in its output, in the gradient it passes back, or in that of its own parameter."""

    def __init__(self, how: str = "output", inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or nn.Linear(8, 8)
        self.root = nn.Parameter(torch.ones(1))
        self.how = how
        self.drawn: list[float] = []

    def forward(self, x):
        y = self.inner(x)
        modes = {"teacher": (True, False), "evaluation": (False,)}.get(self.how, (True,))
        if self.training not in modes or not breaks():
            return y
        if self.how in ("output", "teacher", "evaluation"):
            return y / 0.0
        if self.how == "gradient":
            return BadGradient.apply(y)
        if self.how == "chance":
            self.drawn.append(torch.rand(()).item())
            return y / 0.0 if self.drawn[-1] == self.drawn[0] else y  # only with the random number of the step itself
        assert self.how == "own gradient"  # of one parameter alone
        return y + 0.0 * (self.root - self.root.detach()).sqrt()


def plan(**broken: str) -> segue.Plan:
    def student(teacher, site):
        how = broken.get(site.name.split(".")[1])
        return nn.Linear(8, 8) if how is None else nn.Sequential(nn.Linear(8, 8), Breaking(how))

    return segue.Plan(sites=SITES, student=student, schedule=HALF)


class BreakingLoss(Classification):
    """A loss that is NaN at a step, or whose gradient is, for no reason of the model."""

    def __init__(self, how: str = "value") -> None:
        super().__init__()
        self.how = how

    def __call__(self, model, batch):
        loss = super().__call__(model, batch)
        if not breaks() or not torch.is_grad_enabled():
            return loss
        return loss * math.nan if self.how == "value" else BadGradient.apply(loss)


def broken_batches(value=math.nan, at=BROKEN):
    batches = CountedBatches(count=6).batches
    batches[at][0][1, 2, 3] = value
    return batches


def with_module(name: str, make) -> Net:
    """Put a module in place of one of the model's."""
    model = Net()
    parent, _, leaf = name.rpartition(".")
    place = model.get_submodule(parent)
    setattr(place, leaf, make(getattr(place, leaf)))
    return model


def broken_at(name: str, how: str = "output") -> Net:
    return with_module(name, lambda inner: Breaking(how, inner))


def with_value(name: str, value: float = math.nan) -> Net:
    model = Net()
    with torch.no_grad():
        dict(model.named_parameters())[name].view(-1)[0] = value
    return model


class Overflowing(nn.Module):
    """A block whose own code, outside its modules, overflows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * (1e30 if breaks() else 1.0) * (1e30 if breaks() else 1.0)


class Masked(nn.Module):
    """A module that calls another one for an additive mask, of 0 and -inf."""

    class Mask(nn.Module):
        def forward(self, x):
            return torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.mask, self.inner = self.Mask(), inner

    def forward(self, x):
        return self.inner(x) + self.mask(x).softmax(-1) @ x


class MaskedScores(nn.Module):
    """Attention whose scores come from a module of their own, with -inf where it must not look."""

    class Scores(nn.Module):
        def forward(self, x):
            return (x @ x.transpose(1, 2)).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.scores, self.inner = self.Scores(), inner

    def forward(self, x):
        return self.inner(x) + self.scores(x).softmax(-1) @ x


class Checkpointed(nn.Module):
    """A module under activation checkpointing."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def huge(sign):
    return lambda teacher, site: Huge(sign)


class Huge(nn.Module):
    def __init__(self, sign):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(sign))

    def forward(self, x):
        return torch.full_like(x, 3e38 if breaks() else 1.0) * self.scale.sign() + 0 * self.scale


class BadGuidance(segue.losses.FeatureGuidance):
    def __call__(self, teacher, student, mask=None):
        return super().__call__(teacher, student, mask) * (math.nan if breaks() else 1.0)


def fit(model=None, plan=None, batches=None, loss=None, **recipe):
    more = {name: recipe.pop(name) for name in ("folder", "checkpoint_every", "evaluations", "validation") if name in recipe}
    settings = {"steps": 6, "lr": 1e-2, "clip": 1.0, **recipe}
    return segue.fit(
        model or Net(),
        plan,
        Clock() if batches is None else batches,
        loss or Classification(),
        recipe=segue.Recipe(**settings),
        progress=None,
        **more,
    )


FINITE, BACK = "turns finite input into inf or NaN", "turns a finite gradient into inf or NaN"
WHERE = {
    "batch, NaN": (lambda: {"batches": broken_batches()}, "The batch itself contains inf or NaN."),
    "batch, inf": (lambda: {"batches": broken_batches(math.inf), "plan": plan()}, "The batch itself contains inf or NaN."),
    "module without a plan": (
        lambda: {"model": broken_at("blocks.1.mlp")},
        f"The module 'blocks.1.mlp' (Breaking) {FINITE}.",
    ),
    "module of the backbone": (
        lambda: {"model": broken_at("blocks.1.mlp.0"), "plan": segue.Plan(sites=SITES, schedule=HALF, train="all")},
        f"The module 'blocks.1.mlp.0' (Breaking) of the backbone {FINITE}.",
    ),
    "code between modules": (
        lambda: {"model": with_module("blocks.1", Overflowing)},
        f"The module 'blocks.1' (Overflowing) {FINITE}.",
    ),
    "code of the model itself": (
        lambda: {"model": Overflowing(Net())},
        f"The model itself (Overflowing), in code outside its modules, {FINITE}.",
    ),
    "teacher": (
        lambda: {"model": broken_at("blocks.1.attn", "teacher"), "plan": plan()},
        f"The module 'blocks.1.attn' (Breaking) of the teacher at site 'blocks.1.attn' {FINITE}.",
    ),
    "teacher, guided at weight 0": (
        lambda: {
            "model": broken_at("blocks.1.attn.proj", "teacher"),
            "plan": segue.methods.dcr_dfg(
                sites=SITES, schedule=segue.schedules.Constant(alpha=1.0), student=lambda teacher, site: nn.Linear(8, 8)
            ),
        },
        f"The module 'blocks.1.attn.proj' (Breaking) of the teacher at site 'blocks.1.attn' {FINITE}.",
    ),
    "student": (
        lambda: {"plan": plan(**{"1": "output"})},
        f"The module 'blocks.1.attn.1' (Breaking) of the student at site 'blocks.1.attn' {FINITE}.",
    ),
    "two students": (
        lambda: {"plan": plan(**{"1": "output", "2": "output"})},
        f"The module 'blocks.1.attn.1' (Breaking) of the student at site 'blocks.1.attn' {FINITE}.",
    ),
    "by chance": (
        lambda: {"plan": plan(**{"1": "chance"})},
        f"The module 'blocks.1.attn.1' (Breaking) of the student at site 'blocks.1.attn' {FINITE}.",
    ),
    "blend": (
        lambda: {
            "model": with_module("blocks.1.attn", lambda _: Huge(-1.0)),
            "plan": segue.Plan(sites="blocks.1.attn", student=huge(1.0), schedule=HALF),
        },
        "The blend at site 'blocks.1.attn' of two finite outputs is inf or NaN.",
    ),
    "frozen original": (
        lambda: {
            "model": broken_at("blocks.1.mlp", "evaluation"),
            "plan": segue.methods.distillation(sites=SITES, train="all", backbone="train"),
        },
        f"The module 'blocks.1.mlp' (Breaking) of the frozen original {FINITE}.",
    ),
    "weight of the backbone": (
        lambda: {"model": with_value("blocks.2.mlp.0.bias"), "plan": plan()},
        "The weight 'blocks.2.mlp.0.bias' of the backbone is inf or NaN.",
    ),
    "weight of a teacher": (
        lambda: {"model": with_value("blocks.2.attn.qkv.weight"), "plan": plan()},
        "The weight 'blocks.2.attn.qkv.weight' of the teacher at site 'blocks.2.attn' is inf or NaN.",
    ),
    "weight without a plan": (
        lambda: {"model": with_value("head.weight", math.inf)},
        "The weight 'head.weight' is inf or NaN.",
    ),
    "gradient of one parameter": (
        lambda: {"plan": plan(**{"1": "own gradient"})},
        "The gradient of 'blocks.1.attn.1.root' of the student at site 'blocks.1.attn' is inf or NaN.",
    ),
    "gradient that a module passes back": (
        lambda: {"plan": plan(**{"1": "gradient"})},
        f"The module 'blocks.1.attn.1' (Breaking) of the student at site 'blocks.1.attn' {BACK}.",
    ),
    "gradient without a plan": (
        lambda: {"model": broken_at("blocks.1.mlp", "gradient")},
        f"The module 'blocks.1.mlp' (Breaking) {BACK}.",
    ),
    "gradient of the loss": (
        lambda: {"loss": BreakingLoss("gradient")},
        "The loss is finite, but the gradient that it passes to the model is inf or NaN.",
    ),
    "loss": (
        lambda: {"plan": plan(), "loss": BreakingLoss()},
        "Every module turns finite input into finite output; the loss function returns nan.",
    ),
    "loss without a plan": (
        lambda: {"loss": BreakingLoss()},
        "Every module turns finite input into finite output; the loss function returns nan.",
    ),
    "guidance": (
        lambda: {"plan": segue.Plan(sites=SITES, schedule=HALF, guidance=BadGuidance(schedule=HALF))},
        "Every module turns finite input into finite output; the guidance at site 'blocks.0.attn' is nan.",
    ),
    "norm of finite gradients": (
        lambda: {"loss": lambda model, batch: (1e38 if breaks() else 1.0) * Classification()(model, batch)},
        "Every gradient is finite; only their norm is too large for its type.",
    ),
    "gradient under checkpointing": (
        lambda: {"model": with_module("blocks.1", lambda inner: Checkpointed(Breaking("gradient", inner), False))},
        f"The module 'blocks.1.inner' (Breaking) {BACK}.",
    ),
    "gradient under reentrant checkpointing": (
        lambda: {"model": with_module("blocks.1", lambda inner: Checkpointed(Breaking("gradient", inner), True))},
        "The gradient of 'blocks.1.inner.inner.mlp.0.bias' is inf or NaN.",
    ),
    "after scores with -inf": (
        lambda: {"model": with_module("blocks.0", lambda inner: nn.Sequential(MaskedScores(inner), Breaking()))},
        f"The module 'blocks.0.1' (Breaking) {FINITE}.",
    ),
    "gradient, after scores with -inf": (
        lambda: {"model": with_module("blocks.0", lambda inner: nn.Sequential(MaskedScores(inner), Breaking("gradient")))},
        f"The module 'blocks.0.1' (Breaking) {BACK}.",
    ),
    "beside a mask": (
        lambda: {"model": with_module("blocks.0", Masked), "loss": BreakingLoss()},
        "Every module turns finite input into finite output; the loss function returns nan.",
    ),
}


@pytest.mark.parametrize("case", WHERE)
def test_the_place_the_step_and_the_last_good_checkpoint_are_named(case, tmp_path):
    make, words = WHERE[case]
    settings = make()
    at = 0 if case.startswith("weight") else BROKEN
    with pytest.raises(TrainingError) as caught:
        fit(folder=tmp_path / "run", checkpoint_every=2, **settings)
    asked, found, hint = str(caught.value).splitlines()
    assert asked.startswith(f"step {at} has no finite update: loss ")
    assert found.strip() == words
    assert settings.get("plan") is not None or "site" not in str(caught.value)
    assert ("there is no checkpoint" if at == 0 else f"the last good checkpoint is {tmp_path / 'run'}") in hint
    assert "Recipe(on_nan='skip')" in hint
    assert at == 0 or saved_step(tmp_path / "run" / "checkpoints") == 2


def test_a_weight_of_a_student_is_named_under_its_finished_name():
    def broken(teacher, site):
        student = nn.Linear(8, 8)
        with torch.no_grad():
            student.weight[0, 0] = math.nan if site.index == 1 else 0.0
        return student

    with pytest.raises(TrainingError, match=r"The weight 'blocks.1.attn.weight' of the student at site 'blocks.1.attn' is"):
        fit(Net(), segue.Plan(sites=SITES, student=broken, schedule=HALF))


def test_what_does_not_repeat_itself_is_not_blamed_on_anything():
    forwards = []

    def loss(model, batch):
        forwards.append(0)
        return Classification()(model, batch) * (math.nan if len(forwards) == BROKEN + 1 else 1.0)

    with pytest.raises(TrainingError, match="The same forward, repeated, is finite in every module, and so is its loss"):
        fit(loss=loss)

    def raising(model, batch):
        forwards.append(0)
        if len(forwards) == BROKEN + 2:
            raise RuntimeError("only once")
        return Classification()(model, batch) * (math.nan if len(forwards) == BROKEN + 1 else 1.0)

    forwards.clear()
    with pytest.raises(TrainingError, match="repeated to find the place, raises RuntimeError: only once"):
        fit(loss=raising)


def test_hooks_are_on_modules_only_while_the_place_is_looked_for():
    seen = []

    def loss(model, batch):
        seen.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()))
        return BreakingLoss()(model, batch)

    model = Net()
    with pytest.raises(TrainingError):
        fit(model, loss=loss)
    modules = len(list(model.modules()))
    assert seen == [0] * (BROKEN + 1) + [2 * modules]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_any_batch_of_an_accumulated_step_may_be_the_broken_one():
    for at in (2, 3):
        with pytest.raises(TrainingError, match="step 1 has no finite update") as caught:
            fit(batches=broken_batches(at=at), accumulate=2)
        assert "The batch itself contains inf or NaN" in str(caught.value)
    small, large = torch.ones(4, 8), torch.full((4, 8), 100.0)  # whose exponential is too large for float32
    for inputs in ([small, small, large, small], [small, small, small, large]):
        with pytest.raises(TrainingError, match=r"The module '1' \(Exponential\) of the student at site '1' turns finite"):
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
    "loss": lambda: {"plan": plan(), "loss": BreakingLoss()},
    "loss, guided": lambda: {"plan": segue.methods.dcr_dfg(sites=SITES), "loss": BreakingLoss()},
    "loss, plain": lambda: {"loss": BreakingLoss()},
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
        recipe=segue.Recipe(steps=6, lr=1e-2, on_nan="skip"),
        folder=tmp_path,
        resume=True,
        progress=None,
    )
    assert again.skipped == 1


def test_a_huge_gradient_is_clipped_and_no_reason_to_stop():
    fitted = fit(loss=lambda model, batch: 1e12 * F.cross_entropy(model(batch[0]), batch[1]))
    assert fitted.skipped == 0
    assert all(bool(torch.isfinite(p).all()) for p in fitted.model.parameters())
