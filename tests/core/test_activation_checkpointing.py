"""Activation checkpointing: recomputed forwards repeat the step's weight and record nothing twice."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import segue
from segue.errors import HandoverError
from segue.gates import Bernoulli, Blend, GumbelSoftmax
from segue.losses import FeatureGuidance, LogitDistillation, OnTeacherStream
from segue.schedules import Constant, Hold, Linear
from tests.helpers.models import CASES
from tests.helpers.tiny import SITES, Net, batch
from tests.students.cases import BERT, LLAMA, OPERATORS, TIMM

GATES = [Blend(), Bernoulli(), GumbelSoftmax()]
EXTRAS = {
    "plain": {},
    "guidance": {"guidance": FeatureGuidance()},
    "guidance past takeover": {"guidance": FeatureGuidance(schedule=Constant(alpha=1.0))},
    "guidance on the teacher's stream": {"guidance": OnTeacherStream()},
    "distillation": {"distill": LogitDistillation()},
    "gradient through the teacher": {"guidance": FeatureGuidance(schedule=Constant(alpha=1.0)), "teacher_gradient": True},
}
FAMILIES = {case.name: case for case in CASES}


class Checkpointed(Net):
    """The tiny network, each block recomputed in the backward pass."""

    reentrant = False

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x.mean(1))


class Reentrant(Checkpointed):
    reentrant = True


def run(kind: type[Net], micro_batches: int = 1, steps: int = 6, **settings) -> list[torch.Tensor]:
    """Train across the anneal and the takeover; return every loss and every gradient."""
    torch.manual_seed(0)
    model = kind(dropout=0.2).train()
    plan = segue.Plan(**{"sites": SITES, "schedule": Linear(start=0.8, until=0.4), "seed": 3, **settings})
    handover = segue.replace_(model, plan, total_steps=10)
    optimizer = torch.optim.SGD(handover.parameters(), lr=0.01)
    seen = []
    for step in range(steps):
        for part in range(micro_batches):
            x, y = batch(seed=10 * step + part)
            loss = F.cross_entropy(model(x.requires_grad_()), y) + handover.aux_loss()
            loss.backward()
            seen.append(loss.detach())
        seen += [p.grad.clone() for p in handover.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        handover.step()
    assert set(handover.alphas.values()) == {0.0}
    assert all(x.isfinite().all() for x in seen)
    return seen


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: type(gate).__name__)
def test_losses_and_gradients_are_those_without_it(gate, extra, micro_batches):
    settings = {"gate": gate, "micro_batches": micro_batches, **EXTRAS[extra]}
    torch.testing.assert_close(run(Checkpointed, **settings), run(Net, **settings), rtol=0, atol=0)


def test_the_coins_of_that_run_fall_on_both_sides_at_every_site():
    noise = [segue.gates.Noise(3, step, f"blocks.{i}.attn") for i in range(3) for step in range(4)]
    coins = [Bernoulli()(0.8 - 0.2 * n.step, n) for n in noise]
    assert {sum(coins[site : site + 4]) for site in (0, 4, 8)} <= {1.0, 2.0, 3.0}


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: type(gate).__name__)
def test_local_training_inside_hold_is_the_same(gate):
    settings = {
        "gate": gate,
        "schedule": Hold(fraction=0.3, then=Linear(until=0.1)),
        "guidance": FeatureGuidance(schedule=Constant(alpha=1.0)),
    }
    torch.testing.assert_close(run(Checkpointed, **settings), run(Net, **settings), rtol=0, atol=0)


def test_several_forwards_before_one_backward_are_the_same():
    def gradients(kind):
        model = kind().train()
        handover = segue.replace_(model, segue.Plan(sites=SITES, guidance=FeatureGuidance()), total_steps=20)
        handover.step()
        loss = sum(F.cross_entropy(model(x), y) for x, y in (batch(0), batch(1))) + handover.aux_loss()
        loss.backward()
        return [loss.detach(), *(p.grad for p in handover.parameters())]

    torch.testing.assert_close(gradients(Checkpointed), gradients(Net), rtol=0, atol=0)


def test_a_measurement_between_forward_and_backward_changes_nothing():
    def gradients(kind, measure):
        model = kind().train()
        handover = segue.replace_(model, segue.Plan(sites=SITES), total_steps=20)
        x, y = batch()
        loss = F.cross_entropy(model(x.requires_grad_()), y)
        if measure:
            handover.similarity()
        loss.backward()
        return [x.grad, *(p.grad for p in handover.parameters())]

    torch.testing.assert_close(gradients(Checkpointed, measure=True), gradients(Net, measure=False), rtol=0, atol=0)


def timm_checkpointing(model: nn.Module) -> None:
    model.set_grad_checkpointing(True)


def hf_checkpointing(model: nn.Module) -> None:
    if hasattr(model, "activation_checkpointing_enable"):  # its name in newer versions of transformers
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: type(gate).__name__)
@pytest.mark.parametrize(
    ("family", "enable"),
    [
        ("timm vit_tiny", timm_checkpointing),
        ("HF BERT", hf_checkpointing),
        ("HF GPT-2", hf_checkpointing),
        ("HF Llama", hf_checkpointing),
        ("HF Llama layers", hf_checkpointing),
    ],
)
def test_the_families_own_switches_give_the_same(family, enable, gate):
    case = FAMILIES[family]

    def gradients(recompute: bool) -> list[torch.Tensor]:
        model, data = case.build().train(), case.batch()
        plan = segue.Plan(
            sites=case.sites, gate=gate, guidance=FeatureGuidance(), teacher_gradient=case.teacher_gradient, seed=2
        )
        handover = segue.replace_(model, plan, total_steps=20)
        if recompute:
            enable(model)
        calls = []
        for seam in handover.seams.values():
            leaf = next(module for module in seam.student.modules() if not any(module.children()))
            leaf.register_forward_pre_hook(lambda *_: calls.append(1))  # hooks of a layer itself stay outside its recomputation
        seen = []
        torch.manual_seed(0)
        for _ in range(5):
            loss = data.loss(model) + handover.aux_loss(data.mask)
            seen += [loss.detach(), *torch.autograd.grad(loss, list(handover.parameters()))]
            handover.step()
        recomputed.append(len(calls))
        return seen

    recomputed: list[int] = []
    torch.testing.assert_close(gradients(recompute=True), gradients(recompute=False), rtol=1e-5, atol=1e-7)
    assert recomputed[0] > recomputed[1]


@pytest.mark.parametrize(
    ("operator", "family", "enable"),
    [
        ("Performer", TIMM, timm_checkpointing),
        ("LinearAttention hedgehog", BERT, hf_checkpointing),
        ("WindowedLinear", LLAMA, hf_checkpointing),
    ],
    ids=["Performer", "hedgehog", "WindowedLinear"],
)
def test_recomputed_operators_give_the_same(operator, family, enable):
    def gradients(recompute: bool) -> list[torch.Tensor]:
        model, data = family.build().train(), family.batch()
        handover = segue.replace_(model, family.plan(OPERATORS[operator], guidance=FeatureGuidance()), total_steps=20)
        if recompute:
            enable(model)
        seen = []
        for _ in range(2):
            handover.step()
            loss = data.loss(model) + handover.aux_loss(data.mask)
            seen += [loss.detach(), *torch.autograd.grad(loss, list(handover.parameters()))]
        return seen

    torch.testing.assert_close(gradients(recompute=True), gradients(recompute=False), rtol=1e-5, atol=1e-7)


def test_reentrant_checkpointing_without_guidance_trains():
    torch.testing.assert_close(run(Reentrant), run(Net), rtol=0, atol=0)


@pytest.mark.parametrize("guidance", [FeatureGuidance(), OnTeacherStream()])
def test_reentrant_checkpointing_with_guidance_is_refused(guidance):
    with pytest.raises(HandoverError) as caught:
        run(Reentrant, guidance=guidance)
    assert str(caught.value).splitlines() == [
        "guidance has no gradient at site 'blocks.0.attn'.",
        "  The last forward ran without gradients there, as reentrant activation checkpointing does.",
        "  Hint: use checkpoint(..., use_reentrant=False), or call the model outside torch.no_grad().",
    ]


def test_reentrant_checkpointing_of_some_sites_only_is_refused_too():
    class Half(Net):
        def forward(self, x):
            x = self.blocks[0](x)
            x = checkpoint(self.blocks[1], x, use_reentrant=True)
            return self.head(self.blocks[2](x).mean(1))

    with pytest.raises(HandoverError, match="use_reentrant=False"):
        run(Half, guidance=FeatureGuidance())


def test_an_earlier_forward_without_gradients_is_no_alarm():
    handover = segue.replace_(Net().train(), segue.Plan(sites=SITES, guidance=FeatureGuidance()), total_steps=20)
    x, _ = batch()
    with torch.no_grad():
        handover.model(x)
    handover.model(x)
    total = handover.aux_loss()
    assert sum(handover.losses().values()) == total
