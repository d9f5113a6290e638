"""A measurement touches nothing of the run, whatever the run is doing, and a real model of any family can be measured."""

import copy
import random

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import segue
from segue.core.views import ISOLATED
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
        "last input": handover._last_input,
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
