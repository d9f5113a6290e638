"""Damage: the products against finite differences, the matrix against its definition, the fallback against real swaps."""

import itertools

import pytest
import torch
from torch import nn

from segue.core.blending import call_arguments
from segue.core.modes import View
from segue.core.views import isolated
from segue.errors import PlanError
from segue.planning import damage
from segue.planning.candidates import logits_of
from tests.planning import cases

MODELS = [cases.vit, cases.vit_parts, cases.llama, cases.bert]


def in_double(case):
    model, batches, settings = case()
    wide = [
        {k: v.double() if v.is_floating_point() else v for k, v in b.items()} if isinstance(b, dict) else b.double()
        for b in batches
    ]
    return model.double().eval(), wide, settings


@torch.no_grad()
def blended(candidates, weights, batch):
    """Return the logits with students at these weights, by the seams themselves."""
    args, kwargs = call_arguments(batch)
    with isolated(candidates.handover):
        for seam in candidates.handover.seams.values():
            seam.configure(view=View.TEACHER)
        for option, weight in weights.items():
            candidates.put(option)
            candidates.handover.seams[option[0]].configure(view=View.BLEND, weight=weight, mean=weight)
        return logits_of(candidates.model(*args, **kwargs)).double()


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.__name__)
def test_a_product_is_the_derivative_by_finite_differences(case):
    model, batches, settings = in_double(case)
    with cases.tried(model, batches, settings) as candidates:
        for option in candidates.options:
            _, product = damage.product_of(candidates, option, batches[0])
            step = 2e-3  # norms and rotations of Llama compute in float32, whose noise a smaller step would show
            up, down = (blended(candidates, {option: sign * step}, batches[0]) for sign in (1, -1))
            expected = (up - down) / (2 * step)
            assert float((product - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.__name__)
def test_the_matrix_is_the_mean_of_j_f_j(case):
    model, batches, settings = in_double(case)
    with cases.tried(model, batches, settings) as candidates:
        mask = batches[0].get("attention_mask") if isinstance(batches[0], dict) else None
        found = damage.curvature(candidates, batches[0], mask)
        pairs = [damage.product_of(candidates, option, batches[0]) for option in candidates.options]
    logits = pairs[0][0].double()
    counted = torch.ones(logits.shape[:-1]) if mask is None or logits.dim() == 2 else mask
    expected = torch.zeros(len(pairs), len(pairs), dtype=torch.float64)
    for place in itertools.product(*map(range, logits.shape[:-1])):
        if counted[place]:
            p = logits[place].softmax(-1)
            fisher = torch.diag(p) - torch.outer(p, p)
            j = torch.stack([product[place].double() for _, product in pairs])
            expected += j @ fisher @ j.T
    torch.testing.assert_close(found, expected / counted.sum(), rtol=1e-4, atol=1e-7)


def test_half_of_the_quadratic_form_is_the_divergence_of_a_small_step():
    model, batches, settings = in_double(cases.vit)
    with cases.tried(model, batches, settings) as candidates:
        matrix = damage.curvature(candidates, batches[0], None)
        z = torch.tensor([0.02, 0.01, 0.015], dtype=torch.float64)
        before = blended(candidates, {}, batches[0]).log_softmax(-1)
        after = blended(candidates, dict(zip(candidates.options, z.tolist(), strict=True)), batches[0]).log_softmax(-1)
    kl = (before.exp() * (before - after)).sum(-1).mean()
    assert float(z @ matrix @ z / 2) == pytest.approx(float(kl), rel=0.05)


def test_the_divergence_of_a_subset_is_that_of_the_model_with_these_students():
    model, batches, settings = cases.vit()
    with cases.tried(model, batches, settings) as candidates:
        subset = [candidates.options[0], candidates.options[2]]
        (found,) = damage.divergences(candidates, batches[0], None, [subset])
        students = [candidates.students[option] for option in subset]
    model.eval()
    with torch.no_grad():
        before = model(batches[0]).log_softmax(-1)
        model.blocks[0].attn, model.blocks[2].attn = students
        after = model(batches[0]).log_softmax(-1)
    assert found.kl == pytest.approx(float((before.exp() * (before - after)).sum()), rel=1e-4)
    assert found.differing == float((before.argmax(-1) != after.argmax(-1)).sum())
    assert found.predictions == 4


def test_padding_is_not_counted():
    model, batches, settings = cases.llama()
    with cases.tried(model, batches, settings) as candidates:
        subset = [candidates.options[:1]]
        mask = batches[0]["attention_mask"]
        (all_of_them,), (real,) = (damage.divergences(candidates, batches[0], m, subset) for m in (None, mask))
    assert (all_of_them.predictions, real.predictions) == (21, 15)
    assert real.kl < all_of_them.kl


class NoForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.tanh()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Opaque(nn.Module):
    def forward(self, x):
        return NoForwardMode.apply(x)


def test_an_operator_without_a_forward_mode_derivative_raises():
    model, batches, settings = cases.rows()
    model[3] = Opaque()
    with cases.tried(model, batches, settings) as candidates, pytest.raises((NotImplementedError, RuntimeError)):
        damage.curvature(candidates, batches[0], None)


def test_swaps_explain_singles_and_pairs_exactly():
    model, batches, settings = cases.rows()
    with cases.tried(model, batches, settings) as candidates:
        swaps = [(option,) for option in candidates.options] + damage.pairs_of(candidates.options)
        measured = dict(zip(swaps, damage.divergences(candidates, batches[0], None, swaps), strict=True))
        matrix = damage.from_swaps(candidates.options, {swap: found.kl for swap, found in measured.items()})
    for swap, found in measured.items():
        x = torch.tensor([float(option in swap) for option in candidates.options], dtype=torch.float64)
        assert float(x @ matrix @ x / 2) == pytest.approx(found.kl, rel=1e-9)


def test_subsets_are_distinct_and_of_every_size():
    options = [(f"layers.{i}", name) for i in range(5) for name in "ab"]
    drawn = damage.random_subsets(options, 40, seed=0)
    assert len(set(drawn)) == 40
    assert {len(subset) for subset in drawn} == {2, 3, 4, 5}
    assert all(len({site for site, _ in subset}) == len(subset) for subset in drawn)
    assert drawn == damage.random_subsets(options, 40, seed=0)
    assert len(damage.random_subsets(options[::2], 100, seed=0)) == 26  # those of one site are measured anyway


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))

    def forward(self, x):
        return self.layers(x + torch.randn_like(x))


class Unnamed(Noisy):
    def forward(self, x):
        return {"hidden": self.layers(x)}


@pytest.mark.parametrize(
    ("model", "text"), [(Noisy(), "the same logits for the same batch"), (Unnamed(), "must return logits")]
)
def test_a_random_forward_and_one_without_logits_are_refused(model, text):
    _, batches, _ = cases.rows()
    with pytest.raises(PlanError, match=text):
        damage.require_logits(model, batches)
