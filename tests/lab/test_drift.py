"""Drift: the distance of the stream after each block from the untouched model's."""

import copy

import pytest
import torch

import segue
from segue.lab.drift import Drift, block_of
from segue.sites import select
from segue.training.recipe import Recipe
from segue.training.tasks import Classification
from tests.helpers.tiny import SITES, Net, batch

EXAMPLE = batch(7)


def by_hand(untouched, model):
    """Run the blocks one after the other and compare their outputs, each example's by itself."""
    found = {}
    with torch.no_grad():
        x = y = EXAMPLE[0]
        for index, (theirs, ours) in enumerate(zip(untouched.blocks, model.blocks, strict=True)):
            x, y = theirs(x), ours(y)
            found[f"blocks.{index}.attn"] = ((y - x).square().sum((1, 2)) / x.square().sum((1, 2))).mean().item()
    return found


@pytest.mark.parametrize("method", ["dcr", "lolcats", "theseus_gumbel"])
def test_drift_is_the_relative_squared_distance_after_each_block(method):
    model = Net(dropout=0.3)
    untouched = copy.deepcopy(model).eval()
    drift = Drift(model, select(model, SITES), EXAMPLE, Classification())
    seen = []

    def measured(handover):
        found = drift(handover)
        model.eval()
        blend = by_hand(untouched, model)
        with handover.as_student():
            students = by_hand(untouched, model)
        model.train()
        seen.append(handover.steps_done)
        assert found == {"drift_blend": pytest.approx(blend, rel=1e-4), "drift_students": pytest.approx(students, rel=1e-4)}
        return found

    plan = segue.methods.ALL[method](sites=SITES)
    batches = [batch(i) for i in range(4)]
    recipe = Recipe(steps=10, lr=1e-2)
    points = segue.fit(
        model, plan, batches, Classification(), recipe=recipe, evaluations=5, measure=measured, progress=None
    ).history
    assert len(seen) == len(points) == 6
    assert all(value > 0 for value in points[0]["drift_students"].values())
    if method != "theseus_gumbel":  # which begins with a tenth for the student
        assert set(points[0]["drift_blend"].values()) == {0.0}
    assert points[-1]["drift_blend"] == points[-1]["drift_students"]


def test_measuring_leaves_no_hook_and_every_mode_as_it_was():
    model = Net(dropout=0.3).train()
    drift = Drift(model, select(model, SITES), EXAMPLE, Classification())
    handover = segue.replace_(model, segue.Plan(sites=SITES), total_steps=4)
    modes = [module.training for module in model.modules()]
    drift(handover)
    drift(handover)
    assert [module.training for module in model.modules()] == modes
    assert not any(block._forward_hooks for block in model.blocks)
    assert not any(seam.records for seam in handover.seams.values())


def test_a_padding_mask_counts_tokens_only():
    class Sentences(Net):
        def forward(self, x, attention_mask):
            return super().forward(x)

    x, y = EXAMPLE
    masks = [torch.ones(8, 5), torch.cat([torch.ones(8, 2), torch.zeros(8, 3)], 1)]
    found = []
    for mask in masks:
        model = Sentences()
        given = {"x": x, "attention_mask": mask, "labels": y}
        drift = Drift(model, select(model, SITES), given, Classification())
        found.append(drift(segue.replace_(model, segue.Plan(sites=SITES), total_steps=4))["drift_students"])
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("site", "block"),
    [
        ("blocks.11.attn", "blocks.11"),
        ("bert.encoder.layer.3.attention.self", "bert.encoder.layer.3"),
        ("stages.1.blocks.2.attn.0.inner", "stages.1.blocks.2.attn.0"),
        ("mixer", "mixer"),
        ("layers.4", "layers.4"),
    ],
)
def test_the_block_of_a_site_ends_at_the_last_number_of_its_name(site, block):
    assert block_of(site) == block
