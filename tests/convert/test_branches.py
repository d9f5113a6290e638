"""Branch ablation: leaving a branch out shows what it contributes, and the model is complete again afterwards."""

import pytest
import torch
from torch import nn

from segue.convert import branches, recall
from tests.convert.small_models import model, text, tokenizer


class TwoBranches(nn.Module):
    """A layer with a branch that matters and one that does nothing."""

    branches = ("useful", "idle")
    ablated = None

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        useful = torch.zeros_like(x) if self.ablated == "useful" else self.inner(x)
        return useful if self.ablated == "idle" else useful + 0.0


@pytest.fixture
def models():
    found = {"original": model("llama"), "converted": model("llama")}
    for layer in found["converted"].model.layers:
        layer.mlp = TwoBranches(layer.mlp)
    return found


@torch.no_grad()
def test_every_branch_is_left_out_once(models):
    reads = tokenizer()
    ids = torch.tensor(reads(text(200), add_special_tokens=False)["input_ids"])[: 16 * 8].view(8, 16)
    found = {row["without"]: row for row in branches.compare(models, ids, recall.probes(reads, ids, 64))}
    assert list(found) == [None, "useful", "idle"]
    assert found[None]["kl"]["mean"] == pytest.approx(0, abs=1e-6)
    assert {**found["idle"], "without": None} == found[None]
    assert found["useful"]["kl"]["mean"] > 0.01
    assert found["useful"]["same_first_choice"]["mean"] < 1
    assert all(layer.mlp.ablated is None for layer in models["converted"].model.layers)
    assert branches.compare({"original": models["original"], "converted": models["original"]}, ids, {}) == []


def test_an_operator_is_complete_again_after_an_error(models):
    with pytest.raises(RuntimeError, match="stop"), branches.without(models["converted"], "idle"):
        assert models["converted"].model.layers[0].mlp.ablated == "idle"
        raise RuntimeError("stop")
    assert models["converted"].model.layers[0].mlp.ablated is None
