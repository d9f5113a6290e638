"""What a measurement looks at: sites by pattern, minibatches once."""

import pytest
import torch

from segue.diagnostics.population import chosen_sites, fixed_batches
from segue.errors import DataError, SiteError
from tests.diagnostics import reference


@pytest.fixture(scope="module")
def handover():
    return reference.vit(depth=3, width=4).handover


@pytest.mark.parametrize(
    ("patterns", "indices"),
    [
        (None, (0, 1, 2)),
        ("blocks.*.attn", (0, 1, 2)),
        ("blocks.1.attn", (1,)),
        (["blocks.2.attn", "blocks.0.attn"], (0, 2)),
        (("blocks.{0,1}.attn", "blocks.1.*"), (0, 1)),
    ],
)
def test_sites_are_chosen_by_patterns_in_the_order_of_the_model(handover, patterns, indices):
    assert chosen_sites(handover, patterns) == [f"blocks.{index}.attn" for index in indices]


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names(handover):
    with pytest.raises(SiteError) as caught:
        chosen_sites(handover, ["blocks.*.attn", "blocks.1.atn"])
    assert "'blocks.1.atn' matched none of the 3 sites of the handover." in str(caught.value)
    assert "blocks.1.attn" in str(caught.value)
    assert "only sites of the running handover can be measured" in str(caught.value)


def test_minibatches_are_read_once_and_keep_their_form(handover):
    x = torch.zeros(2)
    found = fixed_batches(iter([x, (x, "label"), {"ids": [x]}]), handover)
    assert len(found) == 3
    assert found[1][1] == "label"
    assert found[2]["ids"][0] is x


def test_no_minibatch_is_refused(handover):
    with pytest.raises(DataError, match="No minibatch was given"):
        fixed_batches(iter([]), handover)
