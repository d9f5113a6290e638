"""Language models compared: a model agrees with itself in everything that is measured."""

import pytest
import torch

from segue.convert import causal, findings
from segue.convert.pretrained import open_base
from segue.errors import ConfigError


@torch.no_grad()
def test_a_model_agrees_with_itself(base):
    opened, said = open_base(str(base("llama"))), []
    ids = torch.randint(4, 300, (5, 14), generator=torch.Generator().manual_seed(3))
    found = causal.compare_causal({"original": opened.model, "converted": opened.model}, opened, ids, (8,), said.append)
    assert (
        found["perplexity_ratio"]["mean"] == found["same_first_choice"]["mean"] == found["greedy"]["equal_tokens"]["mean"] == 1
    )
    assert found["kl"]["mean"] == found["greedy"]["kl_on_own_text"]["converted"]["mean"] == pytest.approx(0, abs=1e-6)
    assert found["perplexity"]["original"] == found["perplexity"]["converted"]
    assert found["branches"] == []
    for kind in found["recall"].values():
        for row in kind["rows"]:
            assert row["accuracy"]["original"] == row["accuracy"]["converted"]
            assert row["gain"]["difference"]["mean"] == 0
    results = {**found, "kind": "causal", "images": False, "parameters": {"original": 1, "converted": 1}}
    assert findings.worse(results).startswith("In nothing")
    assert said == [
        line for line in said if line.startswith("check without a cache on 4 prompts: 7 passes over up to 14 tokens")
    ]
    assert len(said) == 1


def test_contexts_without_positions_are_left_out():
    assert causal.fitting_contexts((16, 1000), 64) == [16]
    assert causal.fitting_contexts(None, 64) == [19, 38]
    assert causal.fitting_contexts(None, None) == list(causal.CONTEXTS)
    with pytest.raises(ConfigError, match="contexts must be at most 38 tokens, got 60"):
        causal.fitting_contexts((60,), 64)
