"""Drop: the model without a module, to the bit."""

import pytest
import torch
from torch import nn

import segue
from segue.errors import StudentError
from segue.students import Drop
from tests.helpers import models


@pytest.mark.parametrize(("sites", "returns"), [("blocks.1", "input"), ("blocks.1.mlp", "zeros")])
def test_it_is_the_model_without_the_module(sites, returns):
    build = models.timm_vit("vit_tiny_patch16_224", 3, depth=3)
    model, expected = models.build(build).eval(), models.build(build).eval()
    images = models.images().args[0]
    plan = segue.Plan(
        sites=sites,
        student=Drop(returns=returns),
        schedule=segue.schedules.Constant(alpha=0.0),
        train="all",
        teacher_gradient=True,
    )
    finished = segue.replace_(model, plan, total_steps=1, example=images).finalize_()
    if returns == "input":
        expected.blocks = nn.Sequential(expected.blocks[0], expected.blocks[2])
    else:
        nn.init.zeros_(expected.blocks[1].mlp.fc2.weight)
        nn.init.zeros_(expected.blocks[1].mlp.fc2.bias)
    with torch.no_grad():
        assert torch.equal(finished(images), expected(images))


def test_a_span_is_refused():
    model = models.build(models.timm_vit("vit_tiny_patch16_224", 3, depth=3))
    plan = segue.Plan(sites=segue.Span("blocks", every=2, last=1), student=Drop())
    with pytest.raises(StudentError, match="cannot replace the span at site 'blocks.0'"):
        segue.replace_(model, plan)
