"""What a handover costs, counted exactly: operations, bytes kept for backward, calls, imports. Times: benchmarks/."""

from __future__ import annotations

import copy
import json
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import segue
from segue.diagnostics.counting import flops, saved_bytes
from segue.gates import Bernoulli, GumbelSoftmax, Noise
from segue.lab.small_vit import VisionTransformer
from segue.losses import FeatureGuidance
from segue.schedules import Constant
from tests.helpers.processes import run_python

SITES = "blocks.*.attn"
DEPTH = 3
IMAGES = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(4)
OUTPUT_BYTES = 4 * 16 * 48 * 4  # (B, N, width) in float32


@pytest.fixture
def original() -> nn.Module:
    torch.manual_seed(0)
    return VisionTransformer(depth=DEPTH)


@pytest.fixture
def by_hand(original: nn.Module) -> nn.Module:
    """The same model with students put in by plain assignment and the rest frozen."""
    model = copy.deepcopy(original).requires_grad_(False)
    for site in segue.select(model, SITES):
        block = model.get_submodule(site.name.removesuffix(".attn"))
        block.attn = segue.students.Reinit()(block.attn, site).requires_grad_(True)
    return model


def start(original: nn.Module, alpha: float, **settings: object) -> segue.Handover:
    """Begin a handover and let the seams compare their two sides once, as they do on the first forward."""
    model = copy.deepcopy(original).train()
    plan = segue.Plan(sites=SITES, schedule=Constant(alpha=alpha), **settings)
    handover = segue.replace_(model, plan, total_steps=100)
    train(handover, steps=1)
    return handover


def train(handover: segue.Handover, steps: int) -> None:
    for _ in range(steps):
        (loss(handover.model) + handover.aux_loss()).backward()
        handover.step()


def loss(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(IMAGES), LABELS)


def step_flops(model: nn.Module, handover: segue.Handover | None = None) -> int:
    return flops(lambda: (loss(model) + (0 if handover is None else handover.aux_loss())).backward())


def kept(model: nn.Module) -> int:
    return saved_bytes(lambda: loss(model), [*model.parameters(), *model.buffers()])


@contextmanager
def counted_calls(handover: segue.Handover) -> Iterator[Counter[str]]:
    """Count how often each side runs."""
    calls: Counter[str] = Counter()
    sides = {
        f"{side} {name}": module
        for name, seam in handover.seams.items()
        for side, module in (("teacher", seam.teacher), ("student", seam.student))
    }
    hooks = [
        module.register_forward_hook(lambda *_, side=side: calls.update([side])) for side, module in sides.items() if module
    ]
    yield calls
    for hook in hooks:
        hook.remove()


def of(side: str, calls: Counter[str]) -> int:
    return sum(count for name, count in calls.items() if name.startswith(side))


def test_the_counter_knows_a_product_and_its_gradients():
    x, layer = torch.ones(5, 3), nn.Linear(3, 7)
    assert flops(lambda: layer(x).sum().backward()) == 2 * (2 * 5 * 3 * 7)  # forward, and the gradient of the weight


def test_the_counter_sees_fused_attention():
    q = torch.ones(1, 1, 6, 4)
    assert flops(lambda: F.scaled_dot_product_attention(q, q, q)) == 2 * (2 * 6 * 6 * 4)


def test_saved_bytes_counts_a_storage_once_and_leaves_parameters_out():
    x, layer = torch.ones(5, 3), nn.Linear(3, 7)
    assert saved_bytes(lambda: layer(x) + layer(x[:]), layer.parameters()) == 5 * 3 * 4


def test_saved_bytes_leaves_nothing_behind():
    layer, outputs = nn.Linear(3, 7), []

    def run() -> None:
        output = layer(torch.ones(5, 3)).exp()  # keeps its own output for backward
        outputs.append(weakref.ref(output))

    assert saved_bytes(run, layer.parameters()) == 5 * (3 + 7) * 4
    assert outputs[0]() is None


def test_students_alone_cost_no_operation_more(original: nn.Module, by_hand: nn.Module):
    expected = step_flops(by_hand)
    running = start(original, alpha=0.5)
    with running.as_student():
        assert step_flops(running.model) == expected
    closed = start(original, alpha=0.0)
    assert step_flops(closed.model) == expected
    finished = closed.finalize_().requires_grad_(False)
    for site in segue.select(finished, SITES):
        finished.get_submodule(site.name).requires_grad_(True)
    assert step_flops(finished) == expected


@pytest.mark.parametrize("guidance", [None, FeatureGuidance(schedule=Constant(alpha=1.0))])
def test_a_blend_costs_one_forward_of_each_teacher(original: nn.Module, by_hand: nn.Module, guidance: FeatureGuidance | None):
    handover = start(original, alpha=0.5, guidance=guidance)
    stream = torch.randn(4, 16, 48)
    with torch.no_grad():
        teachers = sum(flops(lambda seam=seam: seam.teacher(stream)) for seam in handover.seams.values())
    assert step_flops(handover.model, handover) == step_flops(by_hand) + teachers


def test_a_view_of_the_teachers_costs_what_the_original_costs(original: nn.Module):
    handover = start(original, alpha=0.5)
    with torch.no_grad(), handover.as_teacher():
        assert flops(lambda: handover.model(IMAGES)) == flops(lambda: original(IMAGES))


def test_students_alone_keep_no_byte_more_for_backward(original: nn.Module, by_hand: nn.Module):
    running = start(original, alpha=0.5)
    with running.as_student():
        assert kept(running.model) == kept(by_hand)
    assert kept(start(original, alpha=0.0).model) == kept(by_hand)


def test_a_blend_keeps_at_most_one_output_per_site_for_backward(original: nn.Module, by_hand: nn.Module):
    extra = kept(start(original, alpha=0.5).model) - kept(by_hand)
    assert 0 <= extra <= DEPTH * OUTPUT_BYTES


def test_the_teacher_rests_once_alpha_is_zero(original: nn.Module):
    handover = segue.replace_(original.train(), segue.Plan(sites=SITES), total_steps=10)
    train(handover, steps=1)
    assert set(handover.alphas.values()) == {0.3}
    with counted_calls(handover) as calls:
        train(handover, steps=1)
        assert (of("teacher", calls), of("student", calls)) == (DEPTH, DEPTH)
    assert set(handover.alphas.values()) == {0.0}
    with counted_calls(handover) as calls:
        train(handover, steps=3)
        handover.model.eval()(IMAGES)
        assert (of("teacher", calls), of("student", calls)) == (0, 4 * DEPTH)


def test_one_side_rests_while_the_other_is_shown(original: nn.Module):
    handover = start(original, alpha=0.5)
    with counted_calls(handover) as calls, handover.as_teacher():
        handover.model(IMAGES)
        assert (of("teacher", calls), of("student", calls)) == (DEPTH, 0)
    with counted_calls(handover) as calls, handover.as_student():
        handover.model(IMAGES)
        assert (of("teacher", calls), of("student", calls)) == (0, DEPTH)


def test_a_coin_runs_only_the_side_it_chose(original: nn.Module):
    handover = start(original, alpha=0.5, gate=Bernoulli())
    chosen: Counter[str] = Counter()
    with counted_calls(handover) as calls:
        for step in range(1, 21):
            for name in handover.seams:
                coin = Bernoulli()(0.5, Noise(0, step, name))
                chosen[f"{'student' if coin else 'teacher'} {name}"] += 1
            train(handover, steps=1)
    assert calls == chosen
    assert of("teacher", calls) > 0 < of("student", calls)


def test_a_soft_coin_runs_both_sides(original: nn.Module):
    handover = start(original, alpha=0.5, gate=GumbelSoftmax())
    with counted_calls(handover) as calls:
        train(handover, steps=2)
    assert (of("teacher", calls), of("student", calls)) == (2 * DEPTH, 2 * DEPTH)


@pytest.mark.processes
def test_importing_segue_needs_torch_alone():
    code = """
import json, sys, torch
before = set(sys.modules)
import segue
print(json.dumps([sorted({name.partition(".")[0] for name in set(sys.modules) - before}), torch.cuda.is_initialized()]))
"""
    imported, touched_cuda = json.loads(run_python("-c", code).stdout)
    foreign = {name for name in imported if name not in sys.stdlib_module_names}
    assert foreign == {"segue"}
    assert not touched_cuda
