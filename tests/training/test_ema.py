"""The average of the weights: what it is, evaluated, saved, resumed, and given to the model if that is wanted."""

import pytest
import torch
from torch import nn

import segue
from segue.errors import CheckpointError, ConfigError
from segue.training.ema import RunningEma
from segue.training.tasks import Classification
from tests.helpers.tiny import SITES, Net, batch, constant, same_state
from tests.training.fit_cases import CountedBatches, Stop, assert_alike, fit

STEPS = 8
VALIDATION = [batch(50, size=16)]
PLAN = segue.Plan(sites=SITES, schedule=constant(0.0))


def recipe(ema=None, **more):
    return segue.Recipe(**{"steps": STEPS, "lr": 1e-2, "ema": ema, **more})


class Recorded(Classification):
    """A loss that copies the weights that train before each step."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def __call__(self, model, batch):
        if torch.is_grad_enabled():
            self.weights.append({name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad})
        return super().__call__(model, batch)


def trained_weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def averaged(weights, decay):
    """Average by the formula, in float64."""
    found = {name: value.double() for name, value in weights[0].items()}
    for count, now in enumerate(weights[1:], start=1):
        kept = min(decay, (1 + count) / (10 + count))
        found = {name: kept * value + (1 - kept) * now[name].double() for name, value in found.items()}
    return found


@pytest.mark.parametrize("plan", [PLAN, None])
@pytest.mark.parametrize("decay", [0.25, 0.999])
def test_the_model_gets_the_average_by_the_formula_if_that_is_wanted(plan, decay):
    loss, model, raw = Recorded(), Net(), Net()
    fit(model, plan, None, loss, recipe=recipe(segue.Ema(decay=decay, final=True)))
    fit(raw, plan, None, recipe=recipe())
    after_each_step = [*loss.weights[1:], trained_weights(raw)]
    wanted = averaged(after_each_step, decay)
    found = trained_weights(model)
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-7)


def test_without_final_the_model_keeps_its_own_weights_and_the_average_changes_nothing():
    averaging, plain = Net(dropout=0.2), Net(dropout=0.2)
    fit(averaging, PLAN, recipe=recipe(segue.Ema()), validation=VALIDATION)
    fit(plain, PLAN, recipe=recipe(), validation=VALIDATION)
    assert same_state(averaging.state_dict(), plain.state_dict())


@pytest.mark.parametrize("plan", [PLAN, segue.Plan(sites=SITES, schedule=constant(0.5)), None])
def test_its_students_are_evaluated_beside_the_others(plan):
    model = Net()
    fitted = fit(model, plan, recipe=recipe(segue.Ema(decay=0.5, final=True)), validation=VALIDATION, evaluations=4)
    raw = "scores" if plan is None else "students"
    first, *_, last = fitted.history
    assert first["ema"] == first[raw]
    assert last["ema"] != last[raw]
    model.eval()
    with torch.no_grad():
        if fitted.handover is None:
            scores = Classification().scores(model, VALIDATION[0])
        else:
            with fitted.handover.as_student():
                scores = Classification().scores(model, VALIDATION[0])
    assert last["ema"] == pytest.approx({name: score.double().mean().item() for name, score in scores.items()})


def test_without_an_average_nothing_is_evaluated_twice():
    assert all("ema" not in metrics for metrics in fit(recipe=recipe(), validation=VALIDATION).history)


def test_half_precision_is_averaged_in_float32():
    model = nn.Linear(4, 4).bfloat16()
    parameters = list(model.parameters())
    ema = RunningEma(segue.Ema(decay=0.999), parameters, model)
    with torch.no_grad():
        parameters[0].fill_(1.0)
        ema.update()
        ema.steps = 10**6  # past its beginning
        parameters[0].fill_(1.0078125)  # the next number of bfloat16
        ema.update()
    assert ema.weights[0].dtype == torch.float32
    assert ema.weights[0][0, 0].item() == pytest.approx(1.0 + 0.001 * 0.0078125, abs=1e-7)


def test_a_skipped_step_is_not_averaged():
    batches = CountedBatches(count=STEPS).batches
    batches[4] = (batches[4][0] * float("nan"), batches[4][1])
    skipping, leaving_out = Net(), Net()
    settings = {"decay": "constant", "ema": segue.Ema(final=True)}
    fit(skipping, None, batches, recipe=recipe(on_nan="skip", **settings))
    fit(leaving_out, None, [*batches[:4], *batches[5:]], recipe=recipe(**{**settings, "steps": STEPS - 1}))
    assert same_state(skipping.state_dict(), leaving_out.state_dict())


@pytest.mark.parametrize("plan", [PLAN, None])
def test_it_resumes_bit_for_bit(plan, tmp_path):
    def run(folder, loss=None, resume=False):
        model = Net(dropout=0.2)
        settings = {"recipe": recipe(segue.Ema(final=True)), "validation": VALIDATION, "evaluations": (3, 5)}
        fit(model, plan, None, loss or Classification(label_smoothing=0.1), folder=folder, resume=resume, **settings)
        (folder / "model.txt").write_text("")
        return model

    wanted = run(tmp_path / "undisturbed")
    with pytest.raises(SystemExit):
        run(tmp_path / "run", Stop("SIGTERM", 3))
    assert same_state(run(tmp_path / "run", resume=True).state_dict(), wanted.state_dict())
    assert_alike(tmp_path / "undisturbed", tmp_path / "run")
    again = run(tmp_path / "run", resume=True)  # of a finished run
    assert same_state(again.state_dict(), wanted.state_dict())


def test_another_average_is_another_run(tmp_path):
    with pytest.raises(SystemExit):
        fit(Net(), PLAN, None, Stop("SIGTERM", 3), recipe=recipe(segue.Ema()), folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"recipe.ema: Ema\(decay=0.999, final=False\) -> Ema\(decay=0.9, final=False\)"):
        fit(Net(), PLAN, recipe=recipe(segue.Ema(decay=0.9)), folder=tmp_path, resume=True)


@pytest.mark.parametrize("decay", [0, 1, 1.5, "0.9"])
def test_a_decay_is_a_number_between_0_and_1(decay):
    with pytest.raises(ConfigError, match=r"Ema\(decay=...\) must be a number above 0 and below 1"):
        segue.Ema(decay=decay)


@pytest.mark.parametrize("change", [{"steps": -1}, {"steps": "2"}, {"weights": []}, {"weights": [torch.zeros(3)] * 2}])
def test_a_wrong_state_is_refused(change):
    model = nn.Linear(2, 2)
    ema = RunningEma(segue.Ema(), list(model.parameters()), model)
    ema.update()
    state = ema.state_dict()
    with pytest.raises(ValueError, match="average"):
        ema.load_state_dict({**state, **change})
