"""Early stopping: when the students no longer improve, after the teachers are gone."""

import pytest
import torch

import segue
from segue.errors import CheckpointError, ConfigError
from segue.training.tasks import Classification
from tests.helpers.tiny import SITES, Net, batch, constant, same_state
from tests.training.fit_cases import Stop, assert_alike, fit
from tests.training.test_buffers import Normed, containing

STEPS = 12
EVERY = tuple(range(1, STEPS + 1))
PLAN = segue.Plan(sites=SITES, schedule=constant(0.0))


class Scripted(Classification):
    """Scores by a script: one value for each evaluation of the students."""

    def __init__(self, values, name="accuracy"):
        super().__init__()
        self.values, self.name = list(values), name
        self.weights = []

    def scores(self, model, batch):
        self.weights.append({name: value.clone() for name, value in model.state_dict().items()})
        value = self.values[min(len(self.weights), len(self.values)) - 1]
        return {self.name: torch.full((len(batch[1]),), float(value))}


def run(values, model=None, plan=PLAN, evaluations=EVERY, **stopping):
    loss = Scripted(values)
    settings = {"validation": [batch(50)], "evaluations": evaluations}
    recipe = segue.Recipe(steps=STEPS, lr=1e-2, early_stopping=segue.EarlyStopping(**stopping))
    return fit(model or Net(), plan, None, loss, recipe=recipe, **settings), loss


@pytest.mark.parametrize(
    ("values", "settings", "stopped", "best"),
    [
        ([1, 2, 3, 3, 2, 3], {"patience": 3}, 5, 2),
        ([1, 2, 3, 3, 2, 3], {"patience": 1}, 3, 2),
        ([1, 2, 3, 2, 4, 3, 3], {"patience": 2}, 6, 4),
        ([5, 4, 3, 4, 4], {"patience": 2, "mode": "min"}, 4, 2),
        ([1, 1.05, 1.09, 2, 2.05, 2.05], {"patience": 2, "min_delta": 0.1}, 2, 0),
        ([1, float("nan"), float("nan"), 9], {"patience": 2}, 2, 0),
        (range(99), {"patience": 1}, None, STEPS),
    ],
)
def test_it_stops_after_so_many_evaluations_without_a_better_score(values, settings, stopped, best):
    fitted, _ = run(values, **settings)
    assert (fitted.stopped_at, fitted.best_step) == (stopped, best)
    assert fitted.history[-1]["step"] == (STEPS if stopped is None else stopped)
    assert fitted.handover.steps_done == fitted.history[-1]["step"]
    assert fitted.total_steps == STEPS


def test_without_it_nothing_is_reported():
    fitted = fit()
    assert (fitted.stopped_at, fitted.best_step) == (None, None)


@pytest.mark.parametrize("plan", [PLAN, None])
def test_the_model_gets_the_best_weights_if_that_is_wanted(plan):
    for restore in (True, False):
        model = containing(Normed())
        fitted, loss = run([1, 2, 5, 2, 2], model, plan, patience=2, restore_best=restore)
        assert (fitted.stopped_at, fitted.best_step) == (4, 2)
        best, last = loss.weights[2], loss.weights[4]
        assert same_state(model.state_dict(), best if restore else last)
        assert not same_state(best, last)


def test_evaluations_do_not_count_before_alpha_is_0_at_every_site():
    """The students alone score best while their teachers hold the model up."""
    schedule = segue.schedules.Staggered(then=segue.schedules.Linear(), until=0.5, overlap=0.5)
    plan = segue.Plan(sites=SITES, schedule=schedule)
    loss = Scripted([9] * 100)
    settings = {"validation": [batch(50)], "evaluations": EVERY}
    recipe = segue.Recipe(steps=STEPS, early_stopping=segue.EarlyStopping(patience=3))
    fitted = fit(Net(), plan, None, loss, recipe=recipe, **settings)
    assert (fitted.best_step, fitted.stopped_at) == (6, 9)
    fitted.handover.finalize_()


def test_with_an_average_that_the_model_gets_its_score_counts_and_its_best_weights_come_back():
    class Keeping(Classification):
        """A task that keeps the weights that it scores."""

        def __init__(self):
            super().__init__()
            self.seen = []

        def scores(self, model, batch):
            self.seen.append({name: value.clone() for name, value in model.state_dict().items()})
            return super().scores(model, batch)

    ends = []
    for final in (True, False):
        loss, model = Keeping(), Net()
        stopping = segue.EarlyStopping(score="loss", mode="min", patience=2, restore_best=True)
        recipe = segue.Recipe(steps=STEPS, lr=0.02, ema=segue.Ema(decay=0.5, final=final), early_stopping=stopping)
        fitted = fit(model, PLAN, None, loss, recipe=recipe, validation=[batch(50)], evaluations=EVERY)
        scores = [metrics["ema" if final else "students"]["loss"] for metrics in fitted.history]
        assert fitted.best_step == scores.index(min(scores))
        ends.append(model.state_dict())
        assert any(same_state(ends[-1], one) for one in loss.seen)
    assert not same_state(*ends)


@pytest.mark.parametrize("stop", [2, 4])
def test_it_resumes_bit_for_bit(stop, tmp_path):
    def trained(folder, loss=None, resume=False):
        model = Net(dropout=0.2)
        stopping = segue.EarlyStopping(score="loss", mode="min", patience=2, restore_best=True)
        recipe = segue.Recipe(steps=30, lr=0.01, early_stopping=stopping)
        settings = {"validation": [batch(50)], "evaluations": 30, "checkpoint_every": 2}
        loss = loss or Classification(label_smoothing=0.1)
        fitted = fit(model, PLAN, None, loss, recipe=recipe, folder=folder, resume=resume, **settings)
        (folder / "model.txt").write_text("")
        return fitted, model.state_dict()

    wanted, weights = trained(tmp_path / "undisturbed")
    assert 4 < wanted.stopped_at < 30
    with pytest.raises(SystemExit):
        trained(tmp_path / "run", Stop("SIGTERM", stop))
    for _ in range(2):  # the second is the resume of a run that has stopped
        found, same = trained(tmp_path / "run", resume=True)
        assert (found.stopped_at, found.best_step) == (wanted.stopped_at, wanted.best_step)
        assert same_state(same, weights)
        assert_alike(tmp_path / "undisturbed", tmp_path / "run")


def test_other_settings_are_another_run_unless_they_are_allowed(tmp_path):
    def trained(patience, **more):
        stopping = segue.EarlyStopping(patience=patience)
        recipe = segue.Recipe(steps=STEPS, early_stopping=stopping)
        settings = {"validation": [batch(50)], "evaluations": EVERY, "folder": tmp_path, **more}
        return fit(Net(), PLAN, None, Scripted([1] * 99), recipe=recipe, **settings).stopped_at

    assert trained(2) == 2
    with pytest.raises(CheckpointError, match="recipe.early_stopping"):
        trained(4, resume=True)
    assert trained(4, resume=True, allow_changes=["recipe.early_stopping"]) == 4


def test_it_needs_a_score():
    recipe = segue.Recipe(steps=2, early_stopping=segue.EarlyStopping(score="acuracy"))
    model, before = Net(), Net()
    with pytest.raises(ConfigError, match="early stopping needs a score"):
        fit(model, PLAN, recipe=recipe)
    with pytest.raises(ConfigError, match="there is no score 'acuracy' to stop early by"):
        fit(model, PLAN, recipe=recipe, validation=[batch(50)])
    assert same_state(model.state_dict(), before.state_dict())


@pytest.mark.parametrize(
    "change",
    [
        *({"best": "x"}, {"best": float("nan")}, {"best": None}, {"waited": -1}, {"evaluated": 10**9}),
        {"weights": [torch.zeros(2)]},
    ],
)
def test_a_wrong_state_is_refused(change):
    from types import SimpleNamespace

    from segue.training.early_stopping import RunningEarlyStopping

    model = torch.nn.Linear(2, 2)
    loop = SimpleNamespace(model=model, parameters=list(model.parameters()), handover=None, ema=None, done=3, total=9)
    stopping = RunningEarlyStopping(segue.EarlyStopping(), loop)
    stopping.observe({"scores": {"accuracy": 0.5}})
    state = stopping.state_dict()
    stopping.load_state_dict(state)
    with pytest.raises(ValueError, match="best"):
        stopping.load_state_dict({**state, **change})
