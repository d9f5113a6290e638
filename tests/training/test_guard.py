"""The guard: injected spikes are undone, and a run without any is the run without a guard."""

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn

import segue
from segue.errors import ConfigError, TrainingError
from segue.training import distributed
from segue.training.good_state import GoodState
from segue.training.guard import RunningGuard
from segue.training.tasks import Classification
from tests.helpers.tiny import SITES, Net, batch, constant, same_state
from tests.training.fit_cases import CountedBatches, Stop, assert_alike, fit
from tests.training.test_buffers import UPDATES, Normed, containing

STEPS, BAD, KEPT = 24, 14, 12  # a run, its bad step, and the step of the good state before it
GUARD = segue.Guard(warmup=5, window=8, every=4, recovery=6, alpha=0.2)
STILL = segue.Guard(warmup=5, window=8, every=4, recovery=6, alpha=0.0, slowdown=1.0)
GUIDED = segue.losses.FeatureGuidance(schedule=constant(1.0))
HALF = segue.Plan(sites=SITES, schedule=constant(0.5), guidance=GUIDED)
PLANS = {"a plan": HALF, "no plan": None, "everything trains": segue.Plan(sites=SITES, schedule=constant(0.5), train="all")}


def recipe(guard=GUARD, **more):
    return segue.Recipe(**{"steps": STEPS, "lr": 1e-3, "decay": "constant", "guard": guard, **more})


def poisoned(*places, how="huge", count=STEPS):
    """Batches of which some are wrong; with targets that do not depend on the model, their losses differ little."""
    batches = CountedBatches(count=count).batches
    for place in places:
        x, y = batches[place]
        batches[place] = (x * 1e4 if how == "huge" else torch.full_like(x, math.nan)), y
    return batches


class Recorded(Classification):
    """A loss that copies the weights, the buffers, the alphas and the rate with which each step begins."""

    def __init__(self, explode=None):
        super().__init__()
        self.weights, self.buffers, self.alphas, self.explode = [], [], [], explode

    def __call__(self, model, batch):
        if self.explode is not None and len(self.weights) == BAD:
            with torch.no_grad():
                model.get_parameter(self.explode).mul_(1e3)
        self.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        self.buffers.append({name: b.clone() for name, b in model.named_buffers() if "student_" not in name})
        seams = [module for module in model.modules() if hasattr(module, "student_weight")]
        self.alphas.append([1 - seam.student_weight.item() for seam in seams])
        return super().__call__(model, batch)


def test_only_one_event_is_written_for_one_bad_batch():
    fitted = fit(Net(), HALF, poisoned(BAD), recipe=recipe())
    (event,) = fitted.events
    assert {name: event[name] for name in ("step", "kind", "restored", "retry", "rate")} == {
        "step": BAD,
        "kind": "loss",
        "restored": KEPT,
        "retry": 1,
        "rate": 0.5,
    }
    assert event["value"] > 10 * event["level"]
    assert set(event["sites"]) <= set(fitted.handover.seams)
    assert fitted.skipped == 1
    assert [metrics["step"] for metrics in fitted.history if "events" in metrics] == [16]  # the next evaluation


@pytest.mark.parametrize("how", ["huge", "nan"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_restored_run_is_a_run_that_never_saw_those_batches(plan, how):
    """With nothing raised and nothing slowed down: weights, moments and all, bit for bit."""
    batches = poisoned(BAD, how=how)
    model = Net()
    fitted = fit(model, PLANS[plan], batches, recipe=recipe(STILL))
    assert [event["kind"] for event in fitted.events] == ["loss" if how == "huge" else "not finite"]
    other, seen = Net(), [*batches[:KEPT], *batches[BAD + 1 :]]
    fit(other, PLANS[plan], seen, recipe=recipe(None, steps=len(seen)))
    assert same_state(model.state_dict(), other.state_dict())


def test_weights_buffers_and_alphas_go_back_and_the_batches_go_on():
    loss, plan = Recorded(), segue.Plan(sites=SITES, schedule=segue.schedules.Linear(until=0.9), train="all")
    seen = []

    class Watched(CountedBatches):
        def __iter__(self):
            for index, one in enumerate(poisoned(BAD)):
                seen.append(index)
                yield one

    fit(containing(Normed()), plan, Watched(count=STEPS), loss, recipe=recipe())
    assert seen == list(range(STEPS))
    assert same_state(loss.weights[BAD + 1], loss.weights[KEPT])
    assert not same_state(loss.weights[BAD], loss.weights[KEPT])
    assert same_state(loss.buffers[BAD + 1], loss.buffers[KEPT + 1])  # those of the good step's forward, which was judged
    assert all(bool(torch.isfinite(one).all()) for one in loss.buffers[BAD + 1].values())
    falling = [1 - step / (0.9 * STEPS) for step in range(STEPS)]
    for site in range(3):
        course = [alphas[site] for alphas in loss.alphas]
        assert course[: BAD + 1] == pytest.approx([max(0.0, alpha) for alpha in falling[: BAD + 1]])
        assert course[BAD + 1] > course[BAD]
        assert course[-1] == pytest.approx(max(0.0, falling[-1]))


def test_alphas_go_back_to_the_good_state_and_above_it_at_the_responsible_site():
    loss, site = Recorded(explode="blocks.1.attn.student.proj.weight"), "blocks.1.attn"
    plan = segue.Plan(sites=SITES, schedule=segue.schedules.Linear(until=0.9), guidance=GUIDED)
    fitted = fit(Net(), plan, CountedBatches(count=STEPS), loss, recipe=recipe())
    (event,) = fitted.events
    assert event["step"] == BAD
    assert event["sites"] == [site]
    kept, after = loss.alphas[KEPT], loss.alphas[BAD + 1]
    left = 1 - 1 / ((STEPS - BAD) // 2)  # one step of the way back is done
    now = 1 - (BAD + 1) / (0.9 * STEPS)
    wanted = [now + (target - now) * left for target in (kept[0], kept[1] + GUARD.alpha, kept[2])]
    assert after == pytest.approx(wanted)
    assert same_state(loss.weights[BAD + 1], loss.weights[KEPT])
    assert set(fitted.handover.alphas.values()) == {0.0}


def test_the_divergence_alone_is_a_spike_too():
    class Constant(Classification):
        """A task loss without a gradient to speak of."""

        def __call__(self, model, batch):
            return super().__call__(model, batch) * 1e-9 + 1e6

    plan = segue.Plan(sites=SITES, schedule=constant(1.0), guidance=GUIDED)
    batches = CountedBatches(count=STEPS).batches

    class Exploding(Constant):
        calls = 0

        def __call__(self, model, batch):
            self.calls += 1
            if self.calls == BAD + 1:
                with torch.no_grad():
                    model.get_parameter("blocks.1.attn.student.proj.weight").mul_(20.0)
            return super().__call__(model, batch)

    (event,) = fit(Net(), plan, batches, Exploding(), recipe=recipe()).events
    assert (event["step"], event["kind"], event["sites"]) == (BAD, "divergence", ["blocks.1.attn"])


def test_the_rate_is_slowed_down_and_recovers():
    rates = []

    class Rated(segue.Recipe):
        def optimizer(self, *named):
            made = super().optimizer(*named)
            made.register_step_pre_hook(lambda *_: rates.append(made.param_groups[0]["lr"]))
            return made

    settings = {"steps": STEPS, "lr": 1e-3, "decay": "constant", "guard": GUARD}
    fit(Net(), None, poisoned(BAD), recipe=Rated(**settings))
    assert len(rates) == STEPS - 1
    way_back = [1e-3 * (0.5 + 0.5 * step / 6) for step in range(6)]
    assert rates == pytest.approx([1e-3] * BAD + way_back + [1e-3] * (STEPS - BAD - 1 - 6))


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_without_spikes_is_the_run_without_a_guard(plan):
    models = [Net(dropout=0.2), Net(dropout=0.2)]
    histories = [
        fit(model, PLANS[plan], recipe=recipe(guard, decay="cosine"), validation=[batch(50)]).history
        for model, guard in zip(models, (GUARD, None), strict=True)
    ]
    assert same_state(*(model.state_dict() for model in models))
    first, second = ([{**one, "seconds": 0.0} for one in history] for history in histories)
    assert first == second


@pytest.mark.parametrize("case", [case for case in UPDATES if "accumulated" not in case])
def test_buffers_however_they_are_updated_stay_finite_through_a_batch_of_nan(case):
    settings = {"model": Net(), "plan": None, "loss": Classification(), **UPDATES[case]()}
    model, loss = settings["model"], settings["loss"]
    fitted = fit(model, settings["plan"], poisoned(5, how="nan", count=8), loss, recipe=recipe(steps=8))
    owners = [model, *([loss] if isinstance(loss, nn.Module) else [])]
    assert len(fitted.events) == 1
    assert all(bool(torch.isfinite(value).all()) for owner in owners for value in owner.buffers())


@pytest.mark.parametrize("how", [{"guard": GUARD}, {"guard": None, "on_nan": "skip"}])
def test_a_gradient_scaler_goes_on_after_a_batch_of_nan(how, monkeypatch):
    """fp16 needs a GPU, its scaler does not."""
    scalers, make = [], distributed.accelerator

    def scaled(*args):
        made = make(*args)
        made.native_amp, made.state._mixed_precision = True, "fp16"
        made.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
        scalers.append(made.scaler)
        return made

    monkeypatch.setattr(distributed, "accelerator", scaled)
    fitted = fit(Net(), None, poisoned(5, how="nan", count=8), recipe=recipe(steps=8, **how))
    assert fitted.skipped == 1
    (scaler,) = scalers
    assert scaler.get_scale() >= 16.0


def test_the_first_step_can_be_undone_too():
    model, before = Net(), Net()
    fitted = fit(model, None, poisoned(0, how="nan", count=1), recipe=recipe(steps=1))
    assert fitted.events[0]["restored"] == 0
    assert same_state(model.state_dict(), before.state_dict())


@pytest.mark.parametrize(("how", "words"), [("nan", "The batch itself contains inf or NaN"), ("huge", "loss ")])
def test_retries_are_bounded_and_the_error_names_the_checkpoint(how, words, tmp_path):
    model, before = Net(), Net()
    guard = segue.Guard(warmup=5, window=8, every=4, retries=2)
    with pytest.raises(TrainingError) as caught:
        fit(model, HALF, poisoned(*range(BAD, STEPS), how=how), recipe=recipe(guard), folder=tmp_path, checkpoint_every=10)
    first, second, third = str(caught.value).splitlines()
    assert first == f"step {BAD + 2} fails again, after 2 restores of the state of step {KEPT}."
    assert words in second
    assert "the last good checkpoint is" in third
    assert "/00000010-" in third
    assert same_state(model.state_dict(), before.state_dict())


def test_retries_raise_more_and_go_slower_and_a_new_good_state_forgives():
    fitted = fit(Net(), HALF, poisoned(BAD, BAD + 1, BAD + 8, count=30), recipe=recipe(steps=30))
    assert [(event["step"], event["restored"], event["retry"], event["rate"]) for event in fitted.events] == [
        (BAD, KEPT, 1, 0.5),
        (BAD + 1, KEPT, 2, 0.25),
        (BAD + 8, BAD + 6, 1, 0.5),
    ]


JUMPS = {
    "held, then closed": {"schedule": segue.schedules.Hold(fraction=0.5, then=constant(0.0))},
    "two phases": {
        "phases": (
            segue.phases.Phase(name="fit", length=0.5, local=True, task=0.0),
            segue.phases.Phase(name="alone", guidance=0.0),
        )
    },
}


@pytest.mark.parametrize("jump", JUMPS)
def test_a_jump_of_alpha_is_no_spike_and_neither_is_another_loss(jump):
    plan = segue.Plan(sites=SITES, guidance=segue.losses.FeatureGuidance(), **JUMPS[jump])
    model = Net()
    with torch.no_grad():
        model.head.weight.mul_(30.0)  # a confident model, whose loss rises when its students take over untrained
    fitted = fit(model, plan, CountedBatches(count=STEPS), recipe=recipe(segue.Guard(warmup=4, window=8, every=4)))
    assert fitted.events == []


def test_a_method_without_teachers_does_not_get_them():
    fitted = fit(Net(), segue.methods.student_only(sites=SITES), poisoned(BAD), recipe=recipe())
    assert len(fitted.events) == 1
    assert fitted.handover.raised == {}


def test_released_teachers_stay_away():
    plan = segue.Plan(sites=SITES, schedule=segue.schedules.Linear(until=0.3), release=True)
    fitted = fit(Net(), plan, poisoned(BAD), recipe=recipe())
    assert len(fitted.events) == 1
    assert all(seam.teacher is None for seam in fitted.handover.seams.values())


def test_a_teacher_released_since_the_good_state_stays_away():
    """Its alpha was above 0 then; the guard restores and slows down, and has nothing to raise."""
    plan = segue.Plan(sites=SITES, schedule=segue.schedules.Linear(until=(BAD - 0.5) / STEPS), release=True, guidance=None)
    loss = Recorded()
    fitted = fit(Net(), plan, poisoned(BAD), loss, recipe=recipe())
    (event,) = fitted.events
    assert (event["restored"], event["rate"]) == (KEPT, 0.5)
    assert max(loss.alphas[KEPT]) > 0
    assert same_state(loss.weights[BAD + 1], {name: loss.weights[KEPT][name] for name in loss.weights[BAD + 1]})
    assert all(alpha == 0.0 for alphas in loss.alphas[BAD:] for alpha in alphas)


def test_the_errors_of_a_local_fit_go_back_too():
    """A site that rested by an error of undone updates would rest too early."""
    local = segue.phases.Phase(name="fit", length=0.9, local=True, split=2, tolerance=1e-3)
    plan = segue.Plan(sites=SITES, guidance=segue.losses.FeatureGuidance(), phases=(local, segue.phases.Phase(name="alone")))
    seen = []

    class Errors(Classification):
        def __call__(self, model, batch):
            hook = next(iter(model._forward_pre_hooks.values()))
            seen.append(dict(hook.__self__.local.errors))
            return super().__call__(model, batch)

    fitted = fit(Net(), plan, poisoned(BAD), Errors(), recipe=recipe(STILL))
    assert [event["step"] for event in fitted.events] == [BAD]
    assert seen[BAD + 1] == seen[KEPT + 1] != seen[BAD]  # those of the good step, which was judged


def test_the_bytes_that_are_copied_are_those_of_weights_moments_and_buffers(monkeypatch):
    from segue.training.good_state import GoodState

    model, copied = containing(Normed()), []
    keep = GoodState.keep
    monkeypatch.setattr(GoodState, "keep", lambda self, *args: (keep(self, *args), copied.append(self.copied))[0])
    fit(model, None, CountedBatches(count=9), recipe=recipe(steps=9))
    count = sum(parameter.numel() for parameter in model.parameters())
    tensors, statistics = len(list(model.parameters())), 2 * 8 * 4 + 8
    without_moments = 4 * count + statistics
    assert copied == [without_moments, *[4 * (3 * count + tensors) + statistics] * 2]


RESUMED = {
    "students": HALF,
    "falling": segue.methods.dcr_dfg(sites=SITES, schedule=segue.schedules.Linear(until=0.9)),
    "everything": segue.Plan(sites=SITES, schedule=constant(0.5), train="all", backbone="train"),
    "no plan": None,
}


@pytest.mark.parametrize("stop", [BAD - 1, BAD + 1])
@pytest.mark.parametrize("plan", RESUMED)
def test_a_guarded_run_resumes_bit_for_bit_before_and_after_a_restore(plan, stop, tmp_path):
    def run(folder, loss=None, resume=False):
        torch.manual_seed(3)
        model = containing(Normed()) if plan == "everything" else Net(dropout=0.2)
        settings = {"validation": [batch(50)], "evaluations": (5, 15), "checkpoint_every": 1000}
        made = recipe(ema=segue.Ema(decay=0.9))
        loss = loss or Classification(label_smoothing=0.1)
        fitted = fit(model, RESUMED[plan], poisoned(BAD), loss, recipe=made, folder=folder, resume=resume, **settings)
        (folder / "model.txt").write_text("")
        return fitted

    wanted = run(tmp_path / "undisturbed")
    with pytest.raises(SystemExit):
        run(tmp_path / "run", Stop("SIGTERM", stop))
    again = run(tmp_path / "run", resume=True)
    assert [event["step"] for event in again.events] == [BAD]
    assert again.events == wanted.events
    assert_alike(tmp_path / "undisturbed", tmp_path / "run")


def test_a_guard_can_be_added_when_a_run_resumes(tmp_path):
    batches = poisoned(BAD, how="nan")
    with pytest.raises(TrainingError):
        fit(Net(), HALF, batches, recipe=recipe(None), folder=tmp_path, checkpoint_every=10)
    fitted = fit(Net(), HALF, batches, recipe=recipe(), folder=tmp_path, resume=True)
    assert [(event["step"], event["restored"]) for event in fitted.events] == [(BAD, 10)]


def test_a_resumed_run_may_allow_fewer_retries(tmp_path):
    batches = poisoned(*range(BAD, STEPS), how="nan")
    with pytest.raises(SystemExit):
        fit(Net(), HALF, batches, Stop("SIGTERM", BAD + 2), recipe=recipe(copy_of(retries=3)), folder=tmp_path)
    with pytest.raises(TrainingError, match=r"fails again, after \d restores"):
        fit(
            Net(),
            HALF,
            batches,
            Classification(label_smoothing=0.1),
            recipe=recipe(copy_of(retries=1)),
            folder=tmp_path,
            resume=True,
        )


def copy_of(**changes) -> segue.Guard:
    return dataclasses.replace(GUARD, **changes)


HOSTILE = {
    "slowed down later on": lambda state: state.update(slow=[90, 80, 0.5]),
    "a number for a weight": lambda state: state["good"]["tensors"].update({"0/weight": torch.tensor(1.0)}),
    "a number for a moment": lambda state: state["good"]["tensors"].update({"0/optimizer.exp_avg": torch.tensor(1.0)}),
    "weights of another shape": lambda state: state["good"]["tensors"].update({"0/weight": torch.zeros(2, 2)}),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_state_that_no_guard_has_written_is_refused(how):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch(0)[0]).sum().backward()
    optimizer.step()
    guard = RunningGuard(GUARD, GoodState(list(model.parameters()), optimizer, [model]), None)
    guard.begin(0)
    guard.load_state_dict(state := copy.deepcopy(guard.state_dict()))
    HOSTILE[how](state)
    with pytest.raises(ValueError, match=r"slows the training down|a good state with"):
        guard.load_state_dict(state)


def test_a_rate_is_never_below_its_factor():
    guard = RunningGuard(GUARD, GoodState([], torch.optim.AdamW(Net().parameters()), []), None)
    guard.slow = [50, 60, 0.5]
    assert [guard.rate(step) for step in (0, 50, 55, 60)] == [0.5, 0.5, 0.75, 1.0]


def test_settings_are_frozen_and_checked():
    with pytest.raises(ConfigError, match=r"Guard\(slowdown=...\) must be a number above 0 and at most 1"):
        segue.Guard(slowdown=0.0)
    assert copy.replace(GUARD, every=9).every == 9 if hasattr(copy, "replace") else True
