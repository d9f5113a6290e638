"""The local phase of fit(): against a loop written by hand, in every setting that it meets, and what it refuses."""

import math

import pytest
import torch
from torch import nn

import segue
from segue.errors import ConfigError, TrainingError
from segue.losses import FeatureGuidance
from segue.phases import Phase
from segue.training import distributed
from segue.training.distributed import Processes
from segue.training.local_step import parts_of, refuse_unfit
from segue.training.recipe import Recipe
from tests.helpers.tiny import SITES, Net, batch, same_state
from tests.training.fit_cases import CountedBatches, fit

VALIDATION = [batch(50, size=5)]


def plan(train="students", task=1.0, **local) -> segue.Plan:
    phases = (
        Phase(name="local fit", length=0.5, local=True, task=task, **{"split": 2, "reuse": 3, **local}),
        Phase(name="students alone"),
    )
    return segue.Plan(sites=SITES, guidance=FeatureGuidance(), phases=phases, train=train)


def by_hand(model: nn.Module, plan: segue.Plan, batches, recipe: Recipe) -> list[float]:
    """Train with the public interface alone."""
    handover = segue.replace_(model.train(), plan, total_steps=recipe.steps)
    optimizer = recipe.optimizer(handover.named_parameters())
    losses = []
    torch.manual_seed(recipe.seed)
    for step in range(recipe.steps):
        x, y = batches[step % len(batches)]
        recipe.set_rate(optimizer, step, recipe.steps, plan.phases)
        half = torch.autocast("cpu", torch.bfloat16, enabled=recipe.precision == "bf16")
        if handover.phase.local:
            with handover.features() as features, half:
                total = nn.functional.cross_entropy(model(x).float(), y).item()
            updates = features.losses()
        else:
            total = 0.0
            with half:
                updates = iter([nn.functional.cross_entropy(model(x).float(), y) + handover.aux_loss()])
        found = []
        while True:
            with half:
                loss = next(updates, None)
            if loss is None:
                break
            loss.backward()
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(handover.parameters(), recipe.clip)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(total + sum(found) / len(found))
        handover.step()
    return losses


@pytest.mark.parametrize(
    "recipe",
    [Recipe(steps=6, lr=1e-2, warmup=0.2), Recipe(steps=6, lr=1e-2, clip=None), Recipe(steps=6, lr=1e-2, precision="bf16")],
)
def test_it_is_the_loop_that_anyone_would_write(recipe):
    wanted, found = Net(dropout=0.2), Net(dropout=0.2)
    losses = by_hand(wanted, plan(lr=3e-2, weight_decay=0.0), CountedBatches().batches, recipe)
    fitted = fit(found, plan(lr=3e-2, weight_decay=0.0), recipe=recipe, evaluations=6)
    assert same_state(found.state_dict(), wanted.state_dict())
    assert [point["loss"] for point in fitted.history[1:]] == pytest.approx(losses, rel=1e-6)
    assert fitted.handover.steps_done == 6


def test_one_update_through_the_features_is_the_plain_step(monkeypatch):
    """The path of a phase with several updates, taken for one, has the weights of the plain path bit for bit."""
    plain, through = Net(), Net()
    fit(plain, plan(split=1, reuse=1), evaluations=0)
    monkeypatch.setattr("segue.training.local_step.has_updates", lambda phase: phase is not None and phase.local)
    fit(through, plan(split=1, reuse=1), evaluations=0)
    assert same_state(plain.state_dict(), through.state_dict())


class Watched(Net):
    """A model that counts how often its head is computed."""

    heads = 0

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        self.heads += 1
        return self.head(x.mean(1))


@pytest.mark.parametrize("recipe", [{}, {"accumulate": 2}, {"guard": segue.Guard()}, {"precision": "bf16"}])
def test_without_a_task_the_head_is_computed_once_and_the_weights_are_those_of_complete_steps(recipe):
    def trained(task=0.0):
        phases = (Phase(name="local fit", length=0.5, local=True, task=task), Phase(name="students alone"))
        held = segue.Plan(sites=SITES, guidance=FeatureGuidance(), phases=phases)
        return fit(Watched(dropout=0.2), held, recipe=Recipe(steps=6, lr=1e-2, **recipe), evaluations=0).model

    found, accumulate = trained(), recipe.get("accumulate", 1)
    assert found.heads == 1 + 3 * accumulate  # the first forward shows which site is the last
    complete = trained(task=1.0)
    assert complete.heads == 6 * accumulate
    assert same_state(found.state_dict(), complete.state_dict())


def test_a_site_that_is_called_twice_has_complete_forwards():
    class Twice(Watched):
        def forward(self, x):
            return super().forward(x + self.blocks[0](x))

    phases = (Phase(name="local fit", local=True, task=0.0),)
    held = segue.Plan(sites=SITES, guidance=FeatureGuidance(), phases=phases)
    assert fit(Twice(), held, steps=4, evaluations=0).model.heads == 4


def test_what_a_loss_draws_after_the_last_site_does_not_depend_on_which_forward_was_complete():
    drawn = []

    def loss(model, batch):
        drawn.append(torch.rand(()).item())
        output = model(batch[0])
        torch.rand(3)
        return nn.functional.cross_entropy(output, batch[1])

    phases = (Phase(name="local fit", local=True, task=0.0),)
    held = segue.Plan(sites=SITES, guidance=FeatureGuidance(), phases=phases)
    fit(Net(), held, steps=3, loss=loss, evaluations=0)
    torch.manual_seed(0)
    assert drawn == [torch.rand(()).item() for _ in range(3)]


def test_more_updates_bring_students_nearer():
    errors = []
    for reuse in (1, 8):
        fitted = fit(Net(), plan(split=1, reuse=reuse), evaluations=(3,), validation=VALIDATION)
        at = next(point for point in fitted.history if point["step"] == 3)
        errors.append(sum(at["relative_error"].values()))
    assert errors[1] < 0.9 * errors[0]


def test_a_compiled_model_is_not_called_in_a_local_phase():
    phases = (Phase(name="local fit", local=True, split=2),)
    held = segue.Plan(sites=SITES, guidance=FeatureGuidance(), phases=phases)
    plain, compiled = (
        fit(Net(), held, recipe=Recipe(steps=2, lr=1e-2, compile=compile), evaluations=0).model for compile in (False, True)
    )
    assert same_state(plain.state_dict(), compiled.state_dict())


def test_an_update_that_is_not_finite_stops_the_training_and_names_the_place():
    batches = CountedBatches().batches
    batches[1][0][0] = math.nan
    with pytest.raises(TrainingError, match="step 1 has no finite update") as caught:
        fit(Net(), plan(), batches, evaluations=0)
    assert "The batch itself contains inf or NaN" in str(caught.value)


def test_a_step_that_is_not_finite_is_left_out_from_there_on():
    batches = CountedBatches().batches
    batches[1][0][1] = math.nan  # in the second sub-batch: the first update is taken
    fitted = fit(Net(), plan(), batches, recipe=Recipe(steps=6, lr=1e-2, on_nan="skip"), evaluations=0)
    assert fitted.skipped == 1
    assert all(torch.isfinite(value).all() for value in fitted.model.state_dict().values())


def test_a_guard_sees_the_updates_and_brings_a_bad_step_back():
    batches = CountedBatches().batches
    watched = Recipe(steps=6, lr=1e-2, guard=segue.Guard())
    calm = [fit(Net(), plan(), batches, recipe=recipe, evaluations=0) for recipe in (Recipe(steps=6, lr=1e-2), watched)]
    assert same_state(*(fitted.model.state_dict() for fitted in calm))
    batches[1][0][1] = math.nan
    fitted = fit(Net(), plan(), batches, recipe=watched, evaluations=0)
    assert fitted.skipped == 1
    assert all(torch.isfinite(value).all() for value in fitted.model.state_dict().values())


def test_a_closed_loop_reads_the_errors_of_the_updates():
    phases = (
        Phase(name="local fit", length=0.5, local=True, split=2, reuse=2),
        Phase(name="rest", schedule=segue.schedules.Adaptive()),
    )
    fitted = fit(Net(), segue.Plan(sites=SITES, guidance=FeatureGuidance(), phases=phases), evaluations=0)
    assert fitted.handover.steps_done == 6


def test_a_run_whose_sites_all_rest_goes_on():
    fitted = fit(Net(), plan(tolerance=100.0), evaluations=0)
    assert fitted.handover.steps_done == 6
    assert fitted.skipped == 0


@pytest.mark.parametrize("how", [{}, {"guard": segue.Guard()}])
def test_a_gradient_scaler_goes_on_where_all_sites_rest(how, monkeypatch):
    """fp16 needs a GPU, its scaler does not."""
    make = distributed.accelerator

    def scaled(*args):
        made = make(*args)
        made.native_amp, made.state._mixed_precision = True, "fp16"
        made.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        return made

    monkeypatch.setattr(distributed, "accelerator", scaled)
    assert fit(Net(), plan(tolerance=1e6), recipe=Recipe(steps=6, **how)).skipped == 0


def test_a_backbone_that_would_train_rests_where_the_phase_has_no_task():
    phases = (Phase(name="local fit", local=True, split=2, task=0.0),)
    everything = segue.Plan(sites=SITES, guidance=FeatureGuidance(), phases=phases, train="all")
    before = Net().state_dict()
    fitted = fit(Net(), everything, steps=2, evaluations=0)
    around = {name: value for name, value in fitted.model.state_dict().items() if name in before}
    assert len(around) > 5
    assert same_state(around, {name: before[name] for name in around})


@pytest.mark.parametrize(
    ("settings", "asked", "said"),
    [
        ({}, {"accumulate": 2, "sharded": False}, "2 batches are accumulated"),
        ({}, {"accumulate": 1, "sharded": True}, "FSDP2"),
        ({"train": "all"}, {"accumulate": 1, "sharded": False}, "train='all'"),
    ],
)
def test_what_leaves_no_place_for_updates_is_refused(settings, asked, said):
    with pytest.raises(ConfigError) as caught:
        refuse_unfit(plan(**settings), **asked)
    assert "cannot take several updates in one step" in str(caught.value)
    assert said in str(caught.value)
    refuse_unfit(plan(split=1, reuse=1, **settings), **asked)


def test_fit_refuses_before_anything_happens(tmp_path):
    with pytest.raises(ConfigError, match="cannot take several updates"):
        fit(model := Net(), plan(), recipe=Recipe(steps=6, accumulate=2), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert same_state(model.state_dict(), Net().state_dict())


@pytest.mark.parametrize("rows", [(3, 2), (4, 4), (1, 0), (1, 5), (2, 2, 3)])
@pytest.mark.parametrize("split", [1, 2, 3, 4])
def test_processes_cut_a_batch_as_one_does(rows, split, monkeypatch):
    whole = list(range(sum(rows)))
    monkeypatch.setattr(Processes, "total", lambda self, values: torch.tensor([float(count) for count in rows]))
    sets: dict[int, list[int]] = {}
    weights: dict[int, float] = {}
    for rank in range(len(rows)):
        mine = whole[sum(rows[:rank]) : sum(rows[: rank + 1])]
        for part, (begin, weight) in enumerate(parts_of(len(mine), split, Processes(torch.device("cpu"), rank, len(rows)))):
            taken = mine[begin::split]
            sets.setdefault(part, []).extend(taken if weight else [])
            weights[part] = weights.get(part, 0.0) + weight
            assert weight == 0 or weight == pytest.approx(len(taken) * len(rows) / len(whole[part::split]))
    assert sets == {part: whole[part::split] for part in range(min(split, len(whole)))}
    assert all(total == pytest.approx(len(rows)) for total in weights.values())
