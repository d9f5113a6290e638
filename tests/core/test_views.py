"""A measurement touches nothing of the run, whatever the run is doing, and a real model of any family can be measured."""

import copy
import random
import threading
from contextlib import nullcontext
from importlib import import_module

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import segue
from segue.core.views import ISOLATED, eager_mode
from segue.diagnostics import Recorder, curvature_bias, gate_gradient_variance, loss_path
from segue.errors import HandoverError
from segue.gates import Bernoulli, GumbelSoftmax
from segue.losses import FeatureGuidance, LogitDistillation
from segue.schedules import Constant, Hold, Linear
from tests.helpers import models
from tests.helpers.tiny import SITES, Net, batch, constant, optimizer_for, same_bits, same_state, start, train
from tests.training.fit_cases import CountedBatches

BATCHES = [batch(50, size=3), batch(51, size=3)]


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def measure_all(handover, batches=BATCHES, loss=loss_fn, alpha=0.5):
    """Take all three measurements, with few points and draws."""
    variance = gate_gradient_variance(handover, batches, loss, alpha, draws=4, most_outcomes=4)
    curvature = curvature_bias(handover, batches[:1], loss, alpha, points=2, iterations=2)
    path = loss_path(handover, batches[:1], loss, alpha, points=3)
    return variance, curvature, path


def state_of(handover):
    """Copy everything that a measurement could touch."""
    model = handover.model
    return {
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "asked": {name: p.requires_grad for name, p in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {name: len(module._forward_hooks) for name, module in model.named_modules()},
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].copy(),
        "python": random.getstate(),
        "steps": handover.steps_done,
        "alphas": handover.alphas,
        "refuses": handover.refuses_unreached,
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "calls": list(handover.auxiliary.calls),
        "last input": handover.last_input,
        "seams": [
            {name: copy.copy(getattr(seam, name)) for name in (*ISOLATED, "state", "modes", "modes_in_graph", "student_weight")}
            for seam in handover.seams.values()
        ],
    }


def assert_same(found, wanted, where=""):
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted), where
    elif isinstance(wanted, np.ndarray):
        assert (found == wanted).all(), where
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for name in wanted:
            assert_same(found[name], wanted[name], f"{where}/{name}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for index, pair in enumerate(zip(found, wanted, strict=True)):
            assert_same(*pair, f"{where}/{index}")
    else:
        assert found == wanted, where


class Checkpointed(Net):
    """The tiny network, each block recomputed in the backward pass."""

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean(1))


HOLD = Hold(fraction=0.5, then=Linear())
GUIDED = {"guidance": FeatureGuidance(schedule=Constant(alpha=1.0))}
RUNS = {
    "a blend": {"schedule": Linear(start=0.9)},
    "coins": {"gate": Bernoulli(), "schedule": Linear(start=0.9)},
    "soft coins with guidance": {"gate": GumbelSoftmax(), "schedule": Linear(start=0.9), **GUIDED},
    "in a hold": {"schedule": HOLD, **GUIDED},
    "after takeover": {"schedule": Linear(start=0.9, until=0.2), "gate": Bernoulli()},
    "after takeover, still guided": {"schedule": Linear(start=0.9, until=0.2), **GUIDED},
    "distilled": {"schedule": Linear(start=0.9), "distill": LogitDistillation()},
    "everything trains": {"schedule": Linear(start=0.9), "train": "all", "backbone": "train"},
}


@pytest.mark.parametrize("name", RUNS)
def test_nothing_of_a_run_is_touched(name):
    handover = start(segue.Plan(sites=SITES, **RUNS[name]), dropout=0.2, depth=2)
    optimizer = optimizer_for(handover)
    torch.manual_seed(1)
    train(handover, optimizer, 4)
    handover.model(batch(9)[0])  # its records wait for the guidance
    for parameter in list(handover.parameters())[1:]:  # and gradients wait for the optimizer, but for one
        parameter.grad = torch.randn_like(parameter)
    before = state_of(handover)
    with torch.no_grad() if name == "coins" else torch.enable_grad():
        measure_all(handover)
    assert_same(state_of(handover), before)
    if handover.plan.guidance is not None:
        assert all(len(seam.records) == 1 for seam in handover.seams.values())
        handover.aux_loss().backward()


@pytest.mark.parametrize("name", RUNS)
def test_training_goes_on_bit_for_bit_after_a_measurement(name):
    def run(measures):
        handover = start(segue.Plan(sites=SITES, **RUNS[name]), dropout=0.2, depth=2)
        optimizer = optimizer_for(handover)
        torch.manual_seed(1)
        losses = train(handover, optimizer, 2)
        if measures:
            measure_all(handover, alpha=None)
        return losses + train(handover, optimizer, 6), handover.model.state_dict()

    (losses, weights), (plain_losses, plain_weights) = run(True), run(False)
    assert losses == plain_losses
    assert same_state(weights, plain_weights)


def test_a_measurement_before_the_first_forward_leaves_the_first_comparison_to_it():
    handover = start(segue.Plan(sites=SITES, gate=Bernoulli()), depth=2)
    before = state_of(handover)
    measure_all(handover)
    assert_same(state_of(handover), before)
    assert not any(seam.state.compared for seam in handover.seams.values())


@pytest.mark.parametrize("gate", [Bernoulli(), GumbelSoftmax()])
def test_it_is_the_same_with_activation_checkpointing(gate):
    plan = segue.Plan(sites=SITES, gate=gate)
    found = [measure_all(segue.replace_(kind(depth=2), plan, total_steps=4)) for kind in (Net, Checkpointed)]
    for plain, recomputed in zip(*found, strict=True):
        assert plain.sites == recomputed.sites if hasattr(plain, "sites") else plain.together == recomputed.together


def test_it_is_the_same_in_a_compiled_model_and_adds_no_graph():
    torch._dynamo.reset()
    plan = segue.Plan(sites=SITES, gate=Bernoulli())
    plain, compiled = start(plan, depth=1), start(plan, depth=1)
    compiled.model.compile(backend="eager")
    loss_fn(compiled.model, BATCHES[0])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    expected, found = measure_all(plain), measure_all(compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert found[0].together == expected[0].together
    assert found[1:] == expected[1:]


def test_dropout_in_the_students_adds_nothing():
    plan = segue.Plan(sites=SITES, gate=Bernoulli())
    found = [measure_all(start(plan, dropout=dropout, depth=2)) for dropout in (0.0, 0.5)]
    assert found[0][0].together == found[1][0].together
    assert found[0][1:] == found[1][1:]


FAMILIES = (
    "timm vit_tiny",
    "timm resnet18",
    "torchvision ViT",
    "torch encoder",
    "HF BERT",
    "HF BERT layers",
    "HF Llama",
    "HF GPT-2",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_every_family_can_be_measured(name):
    case = next(case for case in models.CASES if case.name == name)
    model = case.build().train()
    plan = segue.Plan(sites=case.sites, gate=Bernoulli(), teacher_gradient=case.teacher_gradient)
    handover = segue.replace_(model, plan, total_steps=10)
    sites = list(handover.seams)[:1]
    before = state_of(handover)
    given = case.batch()

    def loss(model, batch):
        return given.loss(model)

    variance = gate_gradient_variance(handover, [0], loss, 0.4, sites, draws=4, most_outcomes=4)
    curvature = curvature_bias(handover, [0], loss, 0.4, sites, points=2, iterations=2)
    path = loss_path(handover, [0], loss, 0.4, sites, points=3)
    assert_same(state_of(handover), before)
    (site,) = sites
    assert variance.alone.sites[site].gate == pytest.approx(0.24 * variance.slopes[site].square, rel=1e-5)
    assert variance.alone.sites[site].gate > 0
    assert variance.alone.sites[site].data == 0.0
    assert curvature.sites[site].bias > 0
    assert curvature.sites[site].curvature > 0
    assert path.sites[site].rises[-1] > 0
    assert 0 < path.sites[site].ratio <= 1.001
    for share, found in ((0.0, path.sites[site].losses[0]), (1.0, path.sites[site].losses[-1])):
        with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            for name, other in handover.seams.items():
                other.set_weight(*((share, share) if name == site else (0.6, 0.6)))
            model.eval()
            assert given.loss(model).item() == pytest.approx(found, rel=1e-5)


@pytest.mark.parametrize("name", ["dcr_dfg", "theseus", "lolcats"])
def test_a_recorder_in_fit_changes_no_loss_and_no_weight(name):
    def fit(measure):
        recipe = segue.Recipe(steps=5, lr=1e-2, seed=4)
        plan = segue.methods.ALL[name](sites=SITES)
        return segue.fit(
            Net(depth=2, dropout=0.2),
            plan,
            CountedBatches(),
            segue.Classification(),
            recipe=recipe,
            evaluations=(1, 3),
            validation=BATCHES,
            measure=measure,
            progress=None,
        )

    recorder = Recorder(BATCHES, loss_fn, ("variance", "curvature", "path"), draws=4, points=2, iterations=2)
    with_it, without = fit(recorder), fit(None)
    assert same_state(with_it.model.state_dict(), without.model.state_dict())
    for point, plain in zip(with_it.history, without.history, strict=True):
        assert {key: value for key, value in plain.items() if key != "seconds"}.items() <= point.items()
        assert set(point) - set(plain) == {
            *("gate_variance", "gate_variance_error", "data_variance", "predicted_variance"),
            *("curvature_bias", "curvature_bound", "path_rise", "path_bound"),
        }


def test_the_views_are_the_original_and_the_finished_model():
    x, _ = batch()
    handover = start(segue.Plan(sites=SITES, schedule=constant(0.4)))
    optimizer = optimizer_for(handover)
    train(handover, optimizer, 4)
    with handover.as_teacher() as model:
        assert same_bits(model(x), Net()(x))
        with handover.as_student():
            students = model(x)
        assert same_bits(model(x), Net()(x))
    assert same_bits(handover.finalize_(force=True)(x), students)


def test_similarity_compares_on_the_students_own_stream():
    handover = start(segue.Plan(sites=SITES, schedule=constant(0.5)))
    x, _ = batch()
    result = handover.similarity(x)
    caught = {}
    seam = handover.seams["blocks.2.attn"]
    hook = seam.student.register_forward_pre_hook(lambda module, args: caught.update(h=args[0]))
    with handover.as_student(), torch.no_grad():
        handover.model.eval()(x)
        hook.remove()
        t, s = seam.teacher(caught["h"]), seam.student(caught["h"])
    expected = F.cosine_similarity(t, s, dim=-1).mean().item()
    assert result["blocks.2.attn"].cosine == pytest.approx(expected, abs=1e-6)
    assert set(result["blocks.0.attn"]._fields) == {"cosine", "cka", "gram_distance", "relative_error"}


def test_similarity_disturbs_nothing_and_takes_the_last_batch():
    handover = start(segue.methods.dcr_dfg(sites=SITES))
    with pytest.raises(HandoverError, match="has not seen a training batch"):
        handover.similarity()
    x, _ = batch()
    handover.model(x)
    random_state = torch.get_rng_state()
    assert handover.similarity() == handover.similarity(x)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert handover.model.training
    assert handover.aux_loss().item() > 0


def test_similarity_is_one_for_a_copy_of_the_teacher():
    handover = start(segue.Plan(sites=SITES, student=lambda teacher, site: copy.deepcopy(teacher)))
    for site in handover.similarity(batch()[0]).values():
        assert site == pytest.approx((1, 1, 0, 0), abs=1e-6)


# Threads


class Slow(Net):
    """A network that waits between its blocks, so that another thread can come between."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.between, self.resume = threading.Event(), threading.Event()

    def forward(self, x):
        x = self.blocks[0](x)
        self.between.set()
        assert self.resume.wait(20)
        return self.head(self.blocks[1](x).mean(1))


TWO_THREADS = (
    "two threads use a model while one of them shows a view of it.\n"
    "  as_student(), as_teacher() and what measures with them change what the model shows, for all threads.\n"
    "  Hint: let one thread at a time use the model, or give the other a model of its own: copy.deepcopy(handover).model."
)


def in_thread(function):
    """Start a function in a thread; return how to wait for its result or its error."""
    outcome = []

    def run():
        try:
            outcome.append(function())
        except HandoverError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()

    def wait():
        thread.join(20)
        return outcome[0]

    return wait


def teachers_of(handover, x):
    with handover.as_teacher() as model:
        return model(x)


@pytest.mark.parametrize("view", ["as_student", "as_teacher", "verify"])
def test_a_view_is_not_shown_to_other_threads(view):
    handover = start(segue.Plan(sites=SITES, schedule=constant(0.5)), depth=2)
    x, _ = batch()
    blend = handover.model(x)
    if view == "verify":
        seen = []
        hook = handover.model.head.register_forward_hook(
            lambda *_: seen.append(in_thread(lambda: handover.model(x))()) if threading.current_thread() is main else None
        )
        main = threading.current_thread()
        handover.verify(x)
        hook.remove()
        assert set(seen) == {TWO_THREADS}
    else:
        with getattr(handover, view)():
            assert in_thread(lambda: handover.model(x))() == TWO_THREADS
            assert in_thread(lambda: teachers_of(handover, x))() == TWO_THREADS
            with handover.as_teacher():
                assert same_bits(handover.model(x), Net(depth=2)(x))
            assert in_thread(lambda: handover.model(x))() == TWO_THREADS
            assert same_bits(in_thread(lambda: teachers_of(copy.deepcopy(handover), x))(), Net(depth=2)(x))
    assert same_bits(in_thread(lambda: handover.model(x))(), blend)


def test_a_forward_that_meets_a_view_of_another_thread_has_no_output():
    model = Slow()
    handover = segue.replace_(model, segue.Plan(sites=SITES, schedule=constant(0.5)), total_steps=4)
    x, _ = batch()
    wait = in_thread(lambda: model(x))
    assert model.between.wait(20)
    with handover.as_student():
        pass
    model.resume.set()
    assert wait() == TWO_THREADS
    assert torch.is_tensor(in_thread(lambda: model(x))())


def test_a_view_that_a_model_shows_in_its_own_forward_is_allowed():
    handover = start(depth=1)
    x, _ = batch()
    inside = []

    def compare(*_):
        with handover.as_student():
            inside.append(handover.model.blocks[0].attn(x))

    hook = handover.model.blocks[0].mlp.register_forward_pre_hook(lambda *_: None if inside else compare())
    handover.model(x)
    hook.remove()
    assert len(inside) == 1


def replica_of(module):
    """Copy a tree of modules as nn.DataParallel does, for a thread of its own."""
    replica = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        replica._modules[name] = replica_of(child)
    for name, parameter in module._parameters.items():
        replica._parameters[name] = parameter
    for name, buffer in module._buffers.items():
        replica._buffers[name] = buffer
    return replica


def test_the_replicas_of_data_parallel_take_the_view_to_their_threads():
    handover = start(segue.Plan(sites=SITES, schedule=constant(0.5)))
    x, _ = batch()
    with handover.as_student():
        expected = handover.model(x)
        waits = [in_thread(lambda: replica_of(handover.model)(x)) for _ in range(2)]
        assert all(same_bits(wait(), expected) for wait in waits)


def test_threads_that_show_no_view_may_share_a_model():
    handover = start(segue.Plan(sites=SITES, schedule=constant(0.5)))
    x, _ = batch()
    expected = handover.model(x)
    waits = [in_thread(lambda: [handover.model(x) for _ in range(5)]) for _ in range(4)]
    assert all(same_bits(output, expected) for wait in waits for output in wait())


def test_views_leave_compiled_code_out_once_there_can_be_any():
    import_module("torch._dynamo")
    assert not isinstance(eager_mode(), nullcontext)
