"""fit(): the training loop, against loops written by hand."""

import copy
import itertools
import re
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding

import segue
from segue.errors import ConfigError, DataError, MissingExtraError, PlanError, SiteError
from segue.training.recipe import Recipe
from segue.training.tasks import Classification
from tests.helpers.tiny import SITES, Net, batch, needs_inductor, same_bits, same_state
from tests.training.fit_cases import VALIDATION, CountedBatches, fit, half_copied, shuffled

METHODS = segue.methods.ALL


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
    fitted = fit(found, recipe=recipe, evaluations=8)
    assert same_state(found.state_dict(), wanted.state_dict())
    assert [point["loss"] for point in fitted.history] == [None, *losses]
    assert fitted.handover is None
    assert "alpha" not in fitted.history[-1]


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("local_fit", "transfer")])  # test_local_step.py
def test_with_a_plan_it_is_the_loop_of_the_readme(method):
    plan = METHODS[method](sites=SITES, seed=3)
    recipe = Recipe(steps=10, lr=1e-2, seed=5)
    wanted, found = Net(dropout=0.2), Net(dropout=0.2)
    losses = by_hand(wanted, plan, CountedBatches(), recipe)
    fitted = fit(found, plan, recipe=recipe, evaluations=10)
    assert same_state(found.state_dict(), wanted.state_dict())
    assert [point["loss"] for point in fitted.history] == [None, *losses]
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


def test_rates_by_kind_without_a_plan_are_refused_before_anything_happens(tmp_path):
    with pytest.raises(ConfigError, match=r"Recipe\(lr=Rates\(...\)\) needs a plan"):
        fit(Net(), None, recipe=Recipe(steps=2, lr=segue.phases.Rates(new=1e-3)), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device that trains in fp16")
def test_fp16_on_a_cpu_is_refused_before_anything_happens(tmp_path):
    model = Net().eval()
    with pytest.raises(ConfigError, match="A CPU has no fp16 training") as caught:
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
@pytest.mark.slow
@needs_inductor
def test_a_compiled_model_learns_the_same():
    plan = METHODS["dcr"](sites=SITES)  # takes over at step 1: one graph before, one after
    recipe = {"steps": 3, "lr": 1e-2}
    torch._dynamo.reset()
    eager = fit(Net(depth=1), plan, recipe=Recipe(**recipe), evaluations=3)
    compiled = fit(Net(depth=1), plan, recipe=Recipe(compile=True, **recipe), evaluations=3)
    torch._dynamo.reset()
    assert [p["loss"] for p in compiled.history[1:]] == pytest.approx([p["loss"] for p in eager.history[1:]], rel=1e-4)
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
    one = fit(Net(), plan, whole, recipe=Recipe(**calm), evaluations=6)
    two = fit(Net(), plan, halves, recipe=Recipe(accumulate=2, **calm), evaluations=6)
    for name, weight in one.model.state_dict().items():
        torch.testing.assert_close(two.model.state_dict()[name], weight, rtol=1e-4, atol=1e-6)
    for first, second in zip(one.history, two.history, strict=True):
        assert second["epoch"] == first["epoch"]
        assert second["loss"] == (first["loss"] and pytest.approx(first["loss"], rel=1e-5))


def test_epochs_are_counted_by_batches_also_where_accumulation_does_not_divide_them():
    fitted = fit(batches=CountedBatches(count=5), recipe=Recipe(epochs=2, accumulate=2))
    assert fitted.total_steps == 5
    assert fitted.history[-1]["epoch"] == pytest.approx(2.0)


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
    fitted = fit(Net(), METHODS["dcr_dfg"](sites=SITES), made(), steps=6, evaluations=6, validation=made())
    if kind != "DataLoader":
        wanted = fit(Net(), METHODS["dcr_dfg"](sites=SITES), pairs, steps=6, evaluations=6)
        assert same_state(fitted.model.state_dict(), wanted.model.state_dict())
    assert len(fitted.history) == 7
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
    assert fitted.history[-1]["students"]["error"] < 0.3 * fitted.history[0]["students"]["error"]
    assert set(fitted.history[0]["blend"]) == {"error"}
    scored_by_loss = fit(Line(), None, batches, squares, steps=2, validation=[(x, target)])
    found = scored_by_loss.history[-1]["scores"]["loss"]
    assert found == pytest.approx(squares(scored_by_loss.model, (x, target)).item(), rel=1e-6)


def test_what_does_not_train_is_left_out_of_the_optimizer():
    model = Net()
    model.blocks.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fit(model, steps=3)
    changed = [name for name, value in model.state_dict().items() if not same_bits(value, before[name])]
    assert changed == ["head.weight", "head.bias"]


def test_progress_shows_loss_alpha_accuracy_and_cosine_in_complete_lines(capsys):
    plan = METHODS["dcr"](sites=SITES, schedule=segue.schedules.Linear())
    fit(Net(), plan, steps=30, evaluations=5, validation=VALIDATION, progress="replacing")
    lines = capsys.readouterr().err.splitlines()
    assert 5 <= len(lines) <= 10
    assert all(line.startswith("replacing: ") for line in lines)
    assert re.fullmatch(r"replacing: 100% 30/30 \[.*it/s, loss .*, alpha 0.00, accuracy .*, cosine .*\]", lines[-1])
    fit(steps=3, progress=None)
    assert capsys.readouterr().err == ""


def test_a_wrong_tracker_is_explained_before_anything_happens(tmp_path):
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    model = Net().eval()
    with pytest.raises(ConfigError, match="there is no tracker 'tensorbord'") as caught:
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


def test_a_plan_that_does_not_fit_leaves_the_model_as_it_was(tmp_path):
    model = Net().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(SiteError, match="matched 0"):
        fit(model, METHODS["dcr"](sites="blocks.*.atn"), folder=tmp_path / "run")
    assert same_state(model.state_dict(), before)
    assert not model.training
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("plan", [None, segue.Plan(sites=SITES)])
def test_a_loss_without_a_gradient_is_explained(plan):
    with pytest.raises(ConfigError, match=r"^the loss has no gradient.\n"):
        fit(plan=plan, loss=lambda model, batch: model(batch[0]).mean().detach())


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy])
def test_a_loss_of_torch_is_refused_because_it_takes_no_model(loss):
    with pytest.raises(ConfigError, match=r"fit\(loss_fn=...\) must be a function \(model, batch\) -> loss, got") as error:
        fit(loss=loss)
    assert "Hint: give segue.Classification(), or for example lambda model, batch: " in str(error.value)


@pytest.mark.parametrize("copied", [0.0, 1e-3])
def test_a_kind_with_a_rate_of_zero_does_not_train(copied):
    """By hand: an optimizer over the others alone, clipped by their gradients alone."""
    recipe = Recipe(steps=4, lr=segue.phases.Rates(new=1e-2, copied=copied), weight_decay=0.5, clip=0.01)
    plan = segue.Plan(sites=SITES, student=half_copied)
    fitted = fit(Net(), plan, recipe=recipe, evaluations=0)
    kinds, teachers = fitted.handover.parameter_kinds(), Net()
    assert all(parameter.requires_grad for parameter in fitted.handover.parameters())
    for name, parameter in fitted.handover.named_parameters():
        if kinds[name] == "copied":
            assert same_bits(parameter, teachers.get_parameter(name)) == (copied == 0.0), name
    if copied == 0.0:
        handover = segue.replace_(Net().train(), plan, total_steps=4)
        named = [(name, p) for name, p in handover.named_parameters() if kinds[name] == "new"]
        optimizer = Recipe(steps=4, lr=1e-2, weight_decay=0.5).optimizer(named)
        for step, (x, y) in enumerate(CountedBatches().batches[:4]):
            Recipe(steps=4, lr=1e-2).set_rate(optimizer, step, 4)
            nn.functional.cross_entropy(handover.model(x), y).backward()
            nn.utils.clip_grad_norm_([p for _, p in named], 0.01)
            optimizer.step()
            handover.model.zero_grad()
            handover.step()
        assert same_state(fitted.model.state_dict(), handover.model.state_dict())


def test_the_parts_of_the_loss_are_named_while_it_trains(capsys):
    plan = segue.methods.dcr_dfg(sites=SITES, distill=segue.losses.LogitDistillation(weight=0.5))
    fit(Net(), plan, steps=3, evaluations=0, progress="training")
    (x, y), model = CountedBatches().batches[0], Net().train()
    handover = segue.replace_(model, plan, total_steps=3)
    parts = {"task": F.cross_entropy(model(x), y)}
    found = handover.losses()
    parts["FeatureGuidance"] = sum(part for name, part in found.items() if name.startswith("guidance/"))
    parts["LogitDistillation"] = found["distill"]
    expected = " + ".join(f"{name} {value.item():.4g}" for name, value in parts.items())
    first, *_, last = capsys.readouterr().err.splitlines()
    assert f", loss {sum(parts.values()).item():.4g}, alpha" in first
    assert first.endswith(f", loss = {expected}]")  # last: 80 columns have no room for it
    assert "FeatureGuidance" not in last  # its weight is 0 by then
    fit(Net(), None, steps=1, evaluations=0, progress="training")
    assert "=" not in capsys.readouterr().err


def test_a_phase_in_which_nothing_trains_is_refused_before_the_first_step():
    phases = (
        segue.phases.Phase(name="all", length=0.5, lr=1e-2),
        segue.phases.Phase(name="none", lr=segue.phases.Rates(new=1e-2, copied=0.0)),
    )
    model, calls = Net(), []
    with pytest.raises(PlanError, match="nothing trains in the phase 'none'"):
        plan = segue.Plan(sites=SITES, student=lambda teacher, site: copy.deepcopy(teacher), phases=phases)
        fit(model, plan, loss=lambda *args: calls.append(args), evaluations=0)
    assert not calls
    assert same_state(model.state_dict(), Net().state_dict())
