"""fit(): the one loop, against loops written by hand; stopped, killed and resumed."""

import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import threading
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding

import segue
from segue.errors import CheckpointError, ConfigError, DataError, MissingExtraError, SiteError
from segue.training.evaluation import Classification
from segue.training.recipe import Recipe
from tests.helpers.tiny import SITES, Net, batch, same_bits, same_state
from tests.training import fit_cases
from tests.training.fit_cases import CASES, TOTAL, VALIDATION, CountedBatches, Fresh, Stop, assert_alike, points, shuffled

METHODS = segue.methods.ALL


def fit(model=None, plan=None, batches=None, loss=None, **settings):
    """Call fit with small defaults."""
    recipe = settings.pop("recipe", None) or Recipe(steps=settings.pop("steps", 6), lr=1e-2)
    return segue.fit(
        Net() if model is None else model,
        plan,
        CountedBatches() if batches is None else batches,
        loss or Classification(),
        recipe=recipe,
        **{"progress": None, **settings},
    )


def by_hand(model, plan, batches, recipe, precision=None):
    """Write the loop as a user would, with torch and segue.replace_ alone."""
    total = recipe.steps
    torch.manual_seed(recipe.seed)
    model.train()
    handover = None if plan is None else segue.replace_(model, plan, total_steps=total)
    trained = list(model.parameters() if handover is None else handover.parameters())
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr)
    losses = []
    for step, (x, y) in zip(range(total), itertools.cycle(batches), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * (recipe.rate(step, total) / recipe.lr)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(model(x).float(), y) + (0.0 if handover is None else handover.aux_loss())
        loss.backward()
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(trained, recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if handover is not None:
            handover.step()
    return losses


RECIPES = {
    "as in the paper": Recipe(steps=8, lr=1e-2, warmup=0.25),
    "clipped hard": Recipe(steps=8, lr=1e-2, clip=0.01),
    "not clipped": Recipe(steps=8, lr=1e-2, clip=None, decay="constant", seed=7),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_without_a_plan_it_is_the_loop_that_anyone_would_write(recipe):
    wanted, found = Net(dropout=0.3), Net(dropout=0.3)
    losses = by_hand(wanted, None, CountedBatches(), recipe)
    fitted = fit(found, recipe=recipe, looks=8)
    assert same_state(found.state_dict(), wanted.state_dict())
    assert [point["loss"] for point in fitted.points] == [None, *losses]
    assert fitted.handover is None
    assert "alpha" not in fitted.points[-1]


@pytest.mark.parametrize("method", METHODS)
def test_with_a_plan_it_is_the_loop_of_the_readme(method):
    plan = METHODS[method](sites=SITES, seed=3)
    recipe = Recipe(steps=10, lr=1e-2, seed=5)
    wanted, found = Net(dropout=0.2), Net(dropout=0.2)
    losses = by_hand(wanted, plan, CountedBatches(), recipe)
    fitted = fit(found, plan, recipe=recipe, looks=10)
    assert same_state(found.state_dict(), wanted.state_dict())
    assert [point["loss"] for point in fitted.points] == [None, *losses]
    assert fitted.handover.steps_done == fitted.total_steps == 10
    assert not any(type(module).__name__ == "Seam" for module in fitted.handover.finalize_().modules())


def test_bf16_is_torchs_autocast():
    plan, recipe = METHODS["dcr_dfg"](sites=SITES), Recipe(steps=5, lr=1e-2, precision="bf16")
    wanted, found, seen = Net(), Net(), []

    class Watched(Classification):
        def __call__(self, model, batch):
            seen.append(model(batch[0]).dtype)
            return super().__call__(model, batch)

    by_hand(wanted, plan, CountedBatches(), recipe, precision="bf16")
    fit(found, plan, recipe=recipe)
    assert same_state(found.state_dict(), wanted.state_dict())
    fit(Net(), None, loss=Watched(), recipe=recipe)
    assert set(seen) == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in found.parameters())


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device that trains in fp16")
def test_fp16_on_a_cpu_is_refused_before_anything_happens(tmp_path):
    model = Net().eval()
    with pytest.raises(ConfigError, match="a CPU has no fp16 training") as caught:
        fit(model, METHODS["dcr"](sites=SITES), recipe=Recipe(steps=2, precision="fp16"), folder=tmp_path / "run")
    assert "use 'bf16' here" in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert not model.training


def test_a_precision_of_an_earlier_training_is_forgotten():
    fit(recipe=Recipe(steps=1, precision="bf16"))
    seen = []
    fit(loss=lambda model, batch: seen.append(model(batch[0]).dtype) or model(batch[0]).sum(), steps=1)
    assert seen == [torch.float32]


def test_an_accelerator_of_the_users_own_that_stopped_between_two_updates_does_not_matter():
    import accelerate

    own = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    try:
        with own.accumulate(nn.Linear(1, 1)):
            pass
        model = Net()
        fit(model, steps=1)
        assert not same_state(model.state_dict(), Net().state_dict())
    finally:
        accelerate.state.GradientState._reset_state()
        accelerate.state.AcceleratorState._reset_state()


def test_without_accelerate_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    model = Net().eval()
    with pytest.raises(MissingExtraError, match="pip install segue"):
        fit(model)
    assert not model.training


def test_one_process_has_nothing_to_shard_with():
    plan = METHODS["dcr"](sites=SITES)
    wanted, found = (fit(Net(), plan, recipe=Recipe(steps=3, shard=shard)).model for shard in (False, True))
    assert same_state(found.state_dict(), wanted.state_dict())


def test_another_thread_may_train():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(fit(steps=2).model.state_dict()))
    thread.start()
    thread.join()
    assert same_state(seen[0], fit(steps=2).model.state_dict())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch.compile's own
def test_a_compiled_model_learns_the_same():
    plan = METHODS["dcr"](sites=SITES)  # takes over at step 1: one graph before, one after
    recipe = {"steps": 3, "lr": 1e-2}
    torch._dynamo.reset()
    eager = fit(Net(depth=1), plan, recipe=Recipe(**recipe), looks=3)
    compiled = fit(Net(depth=1), plan, recipe=Recipe(compile=True, **recipe), looks=3)
    torch._dynamo.reset()
    assert [p["loss"] for p in compiled.points[1:]] == pytest.approx([p["loss"] for p in eager.points[1:]], rel=1e-4)
    assert type(compiled.model) is Net
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("plan", [None, METHODS["dcr_dfg"](sites=SITES)], ids=["plain", "dcr_dfg"])
def test_two_half_batches_are_one_whole_batch(plan):
    whole = [batch(i, size=8) for i in range(4)]
    halves = [(x[part], y[part]) for x, y in whole for part in (slice(0, 4), slice(4, 8))]
    calm = {
        "steps": 6,
        "lr": 1e-2,
        "eps": 1e-3,
    }  # Adam would blow the rounding of a zero gradient (a key's bias) up to its size
    one = fit(Net(), plan, whole, recipe=Recipe(**calm), looks=6)
    two = fit(Net(), plan, halves, recipe=Recipe(accumulate=2, **calm), looks=6)
    for name, weight in one.model.state_dict().items():
        torch.testing.assert_close(two.model.state_dict()[name], weight, rtol=1e-4, atol=1e-6)
    for first, second in zip(one.points, two.points, strict=True):
        assert second["epoch"] == first["epoch"]
        assert second["loss"] == (first["loss"] and pytest.approx(first["loss"], rel=1e-5))


def test_epochs_are_counted_by_batches_also_where_accumulation_does_not_divide_them():
    fitted = fit(batches=CountedBatches(count=5), recipe=Recipe(epochs=2, accumulate=2))
    assert fitted.total_steps == 5
    assert fitted.points[-1]["epoch"] == pytest.approx(2.0)


@pytest.mark.parametrize("kind", ["list", "DataLoader", "generator", "dict", "BatchEncoding"])
def test_any_iterable_of_any_batches_trains(kind):
    pairs = [batch(i, size=4) for i in range(6)]
    made = {
        "list": lambda: pairs,
        "DataLoader": shuffled,
        "generator": lambda: iter(pairs),
        "dict": lambda: [{"x": x, "labels": y} for x, y in pairs],
        "BatchEncoding": lambda: [BatchEncoding({"x": x, "labels": y}) for x, y in pairs],
    }[kind]
    fitted = fit(Net(), METHODS["dcr_dfg"](sites=SITES), made(), steps=6, looks=6, validation=made())
    if kind != "DataLoader":
        wanted = fit(Net(), METHODS["dcr_dfg"](sites=SITES), pairs, steps=6, looks=6)
        assert same_state(fitted.model.state_dict(), wanted.model.state_dict())
    assert len(fitted.points) == 7
    assert fitted.steps_per_epoch == 6


def test_a_generator_that_is_too_short_is_explained_and_one_without_steps_too():
    with pytest.raises(DataError, match="a generator, which ended after 3 batches"):
        fit(batches=(batch(i) for i in range(3)), steps=4)
    with pytest.raises(ConfigError, match="have no len"):
        fit(batches=(batch(i) for i in range(3)), recipe=Recipe(epochs=1))


def test_a_regression_trains_with_a_loss_of_ones_own():
    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 1)

        def forward(self, x):
            return self.inner(x)

    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    target = x @ torch.tensor([[2.0], [-1.0]])
    batches = DataLoader(TensorDataset(x, target), batch_size=16, shuffle=True)

    def squares(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def errors(model, batch):
        return {"error": (model(batch[0]) - batch[1]).abs().squeeze(-1)}

    plan = segue.Plan(sites="inner", student=lambda teacher, site: nn.Linear(2, 1))
    recipe = Recipe(steps=60, lr=0.1, weight_decay=0.0)
    fitted = fit(Line(), plan, batches, squares, recipe=recipe, validation=batches, scores=errors)
    assert fitted.points[-1]["students"]["error"] < 0.3 * fitted.points[0]["students"]["error"]
    assert set(fitted.points[0]["blend"]) == {"error"}
    scored_by_loss = fit(Line(), None, batches, squares, steps=2, validation=[(x, target)])
    found = scored_by_loss.points[-1]["scores"]["loss"]
    assert found == pytest.approx(squares(scored_by_loss.model, (x, target)).item(), rel=1e-6)


def test_what_does_not_train_is_left_out_of_the_optimizer():
    model = Net()
    model.blocks.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fit(model, steps=3)
    changed = [name for name, value in model.state_dict().items() if not same_bits(value, before[name])]
    assert changed == ["head.weight", "head.bias"]


# Looks


def test_a_look_says_what_anyone_would_measure():
    plan = METHODS["theseus_gumbel"](sites=SITES, schedule=segue.schedules.Linear())
    seen = []

    def measured(handover):
        """Measure by hand what the look is about to say."""
        model = handover.model.eval()
        both = {}
        with torch.no_grad():
            for name, view in (("blend", None), ("students", handover.as_student)):
                if view is None:
                    logits = [model(x) for x, _ in VALIDATION]
                else:
                    with view():
                        logits = [model(x) for x, _ in VALIDATION]
                answers, labels = torch.cat(logits), torch.cat([y for _, y in VALIDATION])
                both[name] = {
                    "accuracy": (answers.argmax(-1) == labels).double().mean().item(),
                    "loss": F.cross_entropy(answers, labels).item(),
                }
        both["cosine"] = {site: s.cosine for site, s in handover.similarity(VALIDATION[0][0]).items()}
        both["relative_error"] = {site: s.relative_error for site, s in handover.similarity(VALIDATION[0][0]).items()}
        both["alpha"] = sum(handover.alphas.values()) / 3
        model.train()
        seen.append(both)
        return {"mine": {"steps": handover.steps_done}}

    fitted = fit(Net(), plan, steps=8, looks=(1, 4), validation=VALIDATION, measure=measured)
    assert [point["step"] for point in fitted.points] == [0, 1, 4, 8]
    for point, by_hand in zip(fitted.points, seen, strict=True):
        for side in ("blend", "students"):
            assert point[side] == pytest.approx(by_hand[side], rel=1e-6)
        assert point["cosine"] == by_hand["cosine"]
        assert point["relative_error"] == by_hand["relative_error"]
        assert point["alpha"] == by_hand["alpha"] == 1 - point["step"] / 8
        assert point["mine"] == {"steps": point["step"]}
        assert point["epoch"] == pytest.approx(point["step"] / 6)
    assert fitted.points[0]["blend"] != fitted.points[0]["students"]
    assert fitted.points[-1]["blend"] == fitted.points[-1]["students"]
    assert fitted.points[0]["gradient_norm"] == {}
    assert fitted.points[0]["loss"] is None
    for point in fitted.points:
        assert point["lr"] == pytest.approx(1e-2 * (1 + math.cos(math.pi * point["step"] / 8)) / 2, abs=1e-12)
    times = [point["seconds"] for point in fitted.points]
    assert times == sorted(times)


def test_the_gradient_norm_of_a_site_is_the_mean_since_the_last_look_before_clipping():
    plan, recipe = METHODS["dcr"](sites=SITES, schedule=segue.schedules.Linear()), Recipe(steps=4, lr=1e-2, clip=1e-3)
    fitted = fit(Net(), plan, recipe=recipe, looks=2)
    model = Net()
    torch.manual_seed(0)
    handover = segue.replace_(model.train(), plan, total_steps=4)
    optimizer = recipe.optimizer(handover.named_parameters())
    norms = []
    for x, y in CountedBatches().batches[:4]:
        F.cross_entropy(model(x), y).backward()
        sites = [torch.cat([p.grad.flatten() for p in seam.student.parameters()]).norm() for seam in handover.seams.values()]
        norms.append(torch.stack(sites))
        nn.utils.clip_grad_norm_(handover.parameters(), 1e-3)
        recipe.set_rate(optimizer, handover.steps_done, 4)
        optimizer.step()
        optimizer.zero_grad()
        handover.step()
    for point, wanted in zip(fitted.points[1:], (norms[:2], norms[2:]), strict=True):
        assert list(point["gradient_norm"]) == list(handover.seams)
        torch.testing.assert_close(torch.tensor(list(point["gradient_norm"].values())), torch.stack(wanted).mean(0))


class Drawing(CountedBatches):
    """Batches that draw from every global random state as they are read."""

    def __iter__(self):
        for x, y in self.batches:
            yield x + torch.rand(()) + random.random() + numpy.random.rand(), y


@pytest.mark.parametrize("method", ["dcr_dfg", "theseus", "distillation"])
def test_looking_more_often_does_not_change_what_is_learned(method):
    plan = METHODS[method](sites=SITES)
    held_out = DataLoader(TensorDataset(*batch(60, size=6)), batch_size=4, shuffle=True)

    class Noise(Drawing):
        def __iter__(self):
            yield from held_out
            yield from super().__iter__()

    models = [Net(dropout=0.3) for _ in range(3)]
    for model, looks, validation in zip(models, (1, 10, 1), (Noise(), Noise(), None), strict=True):
        random.seed(1)
        numpy.random.seed(1)
        fit(model, plan, Drawing(), steps=10, looks=looks, validation=validation)
    for model in models[1:]:
        assert same_state(model.state_dict(), models[0].state_dict())


@pytest.mark.parametrize(
    ("looks", "steps"), [(2, [0, 4, 8]), (3, [0, 3, 5, 8]), ((5, 1), [0, 1, 5, 8]), ((8,), [0, 8]), (100, list(range(9)))]
)
def test_looks_come_at_even_distances_or_where_they_were_asked_for(looks, steps):
    assert [point["step"] for point in fit(steps=8, looks=looks).points] == steps


def test_looks_are_json_lines_and_go_to_trackers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plan = METHODS["dcr"](sites=SITES)
    fitted = fit(Net(), plan, steps=4, looks=2, validation=VALIDATION, folder=tmp_path, trackers=["tensorboard"])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == fitted.points
    (written,) = {path.parent for path in tmp_path.glob("**/events.out.tfevents*") if path.parent.name == "segue"}
    events = EventAccumulator(str(written)).Reload()
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert [step for step, _ in found["alpha"]] == [0, 2, 4]
    cosines = [point["cosine"]["blocks.1.attn"] for point in fitted.points]
    assert [value for _, value in found["cosine/blocks.1.attn"]] == pytest.approx(cosines, rel=1e-6)
    assert [value for _, value in found["students/accuracy"]][-1] == pytest.approx(fitted.points[-1]["students"]["accuracy"])


def test_a_wrong_tracker_is_explained_before_anything_happens(tmp_path):
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    model = Net().eval()
    with pytest.raises(ConfigError, match="the tracker 'tensorbord' was asked for") as caught:
        fit(model, folder=tmp_path / "run", trackers=["tensorbord"])
    assert "Nearest names: tensorboard" in str(caught.value)
    missing = [str(name) for name in LOGGER_TYPE_TO_CLASS if str(name) not in map(str, get_available_trackers())]
    if missing:
        with pytest.raises(ConfigError, match="Its package is not installed") as caught:
            fit(model, folder=tmp_path / "run", trackers=missing[:1])
        assert f"pip install {missing[0]}" in str(caught.value)
    with pytest.raises(ConfigError, match="give fit a folder="):
        fit(model, trackers=["tensorboard"])
    assert not (tmp_path / "run").exists()
    assert not model.training


def test_progress_tells_loss_alpha_accuracy_and_cosine_in_whole_lines(capsys):
    plan = METHODS["dcr"](sites=SITES, schedule=segue.schedules.Linear())
    fit(Net(), plan, steps=30, looks=5, validation=VALIDATION, progress="replacing")
    lines = capsys.readouterr().err.splitlines()
    assert 5 <= len(lines) <= 10
    assert all(line.startswith("replacing [") for line in lines)
    assert all(word in lines[-1] for word in ("100%", "loss ", "alpha 0.00", "accuracy ", "cosine "))
    assert "left" in lines[0]
    fit(steps=3, progress=None)
    assert capsys.readouterr().err == ""


def test_a_plan_that_does_not_fit_leaves_the_model_as_it_was(tmp_path):
    model = Net().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(SiteError, match="matched 0"):
        fit(model, METHODS["dcr"](sites="blocks.*.atn"), folder=tmp_path / "run")
    assert same_state(model.state_dict(), before)
    assert not model.training
    assert not (tmp_path / "run").exists()


# Stopped and resumed


def undisturbed(name, tmp_path):
    fit_cases.train(name, tmp_path / "undisturbed")
    return tmp_path / "undisturbed"


HOWS = {"SIGTERM": SystemExit, "SIGINT": KeyboardInterrupt, "error": RuntimeError}


def stop(name, folder, how, step):
    """Train a case until it is stopped."""
    accumulate = CASES[name]["recipe"].accumulate
    with pytest.raises(HOWS[how]):
        fit_cases.train(name, folder, loss=Stop(how, step, accumulate))


def test_a_run_stopped_anywhere_goes_on_bit_for_bit_in_a_fresh_process(tmp_path):
    """Every case is stopped at another place by a signal, or by an error after its last checkpoint; two in every way."""
    steps, ways = itertools.cycle((4, 7, 1, 5, 2, 6, 3)), itertools.cycle(HOWS)
    places = {}
    for name in CASES:
        for how in HOWS if name in ("dcr_dfg", "a plain model") else [next(ways)]:
            folder = tmp_path / f"{name}, {how}"
            stop(name, folder, how, next(steps))
            places[str(folder)] = name
    Fresh(fit_cases.train_all, places, words=tmp_path / "words").succeed()
    for name in CASES:
        fit_cases.train(name, tmp_path / name)
    for folder, name in places.items():
        assert_alike(folder, tmp_path / name)


def test_the_undisturbed_runs_of_those_cases_really_learn_and_hand_over(tmp_path):
    for name in ("dcr_dfg", "theseus", "a plain model"):
        fitted = fit_cases.train(name, tmp_path / name)
        assert len({point["loss"] for point in fitted.points}) == len(fitted.points) == 5
        if fitted.handover:
            assert fitted.points[0]["alpha"] > fitted.points[2]["alpha"] > fitted.points[-1]["alpha"] == 0


@pytest.mark.parametrize(("how", "code"), [("SIGTERM", 143), ("SIGINT", None)])
def test_a_signal_lets_the_step_end_and_saves_it(how, code, tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(HOWS[how]) as caught:
        fit_cases.train("dcr_dfg", tmp_path, loss=Stop(how, 4))
    assert segue.checkpoint.state.saved_step(tmp_path / "checkpoints") == 5
    if code is None:
        assert f"stopped at step 5 of {TOTAL}; resume from {tmp_path}" in str(caught.value)
    else:
        assert caught.value.code == code
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_ctrl_c_does_not_wait_for_the_step(tmp_path):
    class Impatient(Stop):
        def __call__(self, model, batch):
            loss = super().__call__(model, batch)
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return loss

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fit_cases.train("dcr_dfg", tmp_path, loss=Impatient("SIGINT", 4))
    assert segue.checkpoint.state.saved_step(tmp_path / "checkpoints") == 3  # the last of every three
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT"])
def test_a_signal_in_the_last_step_is_not_lost(how, tmp_path):
    """A teacher's second stage, or the next run of a script, must not begin after it; the work is saved as always."""
    with pytest.raises(HOWS[how]):
        fit_cases.train("dcr_dfg", tmp_path, loss=Stop(how, TOTAL - 1))
    assert segue.checkpoint.state.saved_step(tmp_path / "checkpoints") == TOTAL
    fit_cases.train("dcr_dfg", tmp_path)
    assert_alike(tmp_path, undisturbed("dcr_dfg", tmp_path))


def test_without_a_folder_a_signal_stops_too():
    with pytest.raises(KeyboardInterrupt, match="stopped at step 2 of 6; nothing was saved"):
        fit(Net(), loss=Stop("SIGINT", 1))


def test_a_signal_during_a_look_is_heard_after_the_next_step(tmp_path):
    class Looked(Classification):
        def scores(self, model, batch):
            if len(points(tmp_path)) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().scores(model, batch)

    (tmp_path / "metrics.jsonl").write_text("")
    try:
        with pytest.raises(SystemExit):
            fit_cases.train("dcr_dfg", tmp_path, loss=Looked(label_smoothing=0.1))
    except KeyboardInterrupt:
        pytest.fail("a SIGTERM that came again stopped the look at once")
    assert segue.checkpoint.state.saved_step(tmp_path / "checkpoints") == 6


def test_an_earlier_training_in_the_folder_is_refused_and_nothing_is_changed(tmp_path):
    fit_cases.train("dcr_dfg", tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.glob("**/*") if path.is_file()}
    model = Net().eval()
    with pytest.raises(CheckpointError, match="An earlier one lies there") as caught:
        fit(model, METHODS["dcr"](sites=SITES), folder=tmp_path)
    assert "resume=True" in str(caught.value)
    assert {path: path.read_bytes() for path in tmp_path.glob("**/*") if path.is_file()} == files
    assert not model.training
    assert same_state(model.state_dict(), Net().state_dict())


def test_resuming_what_is_finished_or_never_began_is_no_mistake(tmp_path):
    first = fit_cases.train("theseus", tmp_path, resume=True)
    again = fit_cases.train("theseus", tmp_path, resume=True, loss=Stop("error", 0))  # no step is taken
    assert again.points == first.points
    assert again.seconds == first.seconds
    assert again.handover.steps_done == TOTAL
    assert same_state(again.model.state_dict(), first.model.state_dict())


def test_a_torn_last_line_of_the_metrics_is_written_anew(tmp_path):
    for name in ("dcr_dfg", "a plain model"):
        stop(name, tmp_path / name, "error", 7)
        path = tmp_path / name / "metrics.jsonl"
        whole = path.read_bytes()
        for torn in (whole[:-1], whole[:-20], whole + b'{"step": 7, "ep', whole + b"\0\0\0"):
            folder = tmp_path / "torn"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(tmp_path / name, folder)
            (folder / "metrics.jsonl").write_bytes(torn)
            fit_cases.train(name, folder)
            if torn != whole[:-20]:  # there the look of step 6, at the checkpoint, is gone for good
                assert [point["step"] for point in points(folder)] == [0, 2, 5, 6, TOTAL]
            json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def test_points_after_the_last_checkpoint_are_seen_again_once(tmp_path):
    stop("dcr_dfg", tmp_path, "error", 5)  # saved at 3, looked at 5
    assert [point["step"] for point in points(tmp_path)] == [0, 2, 5]
    fitted = fit_cases.train("dcr_dfg", tmp_path)
    assert [point["step"] for point in fitted.points] == [point["step"] for point in points(tmp_path)] == [0, 2, 5, 6, TOTAL]


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    fit_cases.train("a plain model", tmp_path / "plain")
    with pytest.raises(CheckpointError, match="It holds a plain model in training"):
        fit(Net(), METHODS["dcr"](sites=SITES), folder=tmp_path / "plain", resume=True)
    fit_cases.train("dcr_dfg", tmp_path / "handover")
    with pytest.raises(CheckpointError, match="It holds a running handover"):
        fit(Net(), folder=tmp_path / "handover", resume=True)
    with pytest.raises(CheckpointError, match="differ from those it was trained with"):
        fit(Net(seed=1), CASES["dcr_dfg"]["plan"], folder=tmp_path / "handover", resume=True)


# Killed


def test_kill_9_at_any_move_of_writing_a_checkpoint_loses_nothing_but_steps(tmp_path):
    """The eight moves of one writing, spread over the first three checkpoints."""
    wanted = undisturbed("theseus_gumbel", tmp_path)
    resumed = {}
    for number in (0, 2, 5, 9, 13, 15, 17, 22):
        folder = tmp_path / f"move {number}"
        assert (
            Fresh(fit_cases.train_and_die_writing, "theseus_gumbel", str(folder), number, words=tmp_path / "words").end()
            == -signal.SIGKILL
        )
        resumed[str(folder)] = "theseus_gumbel"
    saved = [
        segue.checkpoint.state.saved_step(Path(f) / "checkpoints") for f in resumed if (Path(f) / "checkpoints/latest").exists()
    ]
    assert len(set(saved)) > 1
    Fresh(fit_cases.train_all, resumed, words=tmp_path / "words").succeed()
    for folder in resumed:
        assert_alike(folder, wanted)
        assert not list(Path(folder).glob("checkpoints/.draft-*")), "what a kill left half written is cleared away"


def test_kill_9_at_random_moments_loses_nothing_but_steps(tmp_path):
    killed = 0
    for name in ("everything trains", "a plain model, accumulated"):
        for moment in (0.05, *(random.Random(name).uniform(0.05, 0.5) for _ in range(3)), None):
            process = Fresh(fit_cases.train_all, {str(tmp_path / name): name}, words=tmp_path / "words")
            if moment is not None:
                process.process.join(timeout=moment)
                process.process.kill()
            killed += process.end() == -signal.SIGKILL
        fit_cases.train(name, tmp_path / "undisturbed" / name)
        assert_alike(tmp_path / name, tmp_path / "undisturbed" / name)
    assert killed > 0


def test_a_training_of_another_length_does_not_go_on(tmp_path):
    torch.manual_seed(0)
    model, batches = torch.nn.Linear(3, 1), [torch.randn(4, 3)]

    def squares(model, batch):
        return model(batch).square().mean()

    segue.fit(model, None, batches, squares, recipe=segue.Recipe(steps=2), folder=tmp_path, progress=None)
    with pytest.raises(CheckpointError, match="The one that lies there was to take 2"):
        segue.fit(model, None, batches, squares, recipe=segue.Recipe(steps=3), folder=tmp_path, resume=True, progress=None)
