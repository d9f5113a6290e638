"""LoRA around the sites: what is adapted, what trains, and the plain model in the end."""

import copy

import pytest
import torch
from torch import nn

import segue
from segue.errors import HandoverError
from segue.integrations.peft import add_lora_, merge_lora_
from tests.convert.small_models import ATTENTION, model
from tests.helpers.tiny import same_state

IDS = torch.arange(24).reshape(2, 12) * 5 % 290 + 4


def logits(found):
    with torch.no_grad():
        return found(IDS).logits


@pytest.mark.parametrize(("kind", "adapted"), [("llama", 6), ("gpt2", 4)])
def test_adapters_are_around_the_sites_and_disappear_in_the_end(kind, adapted):
    original, found = model(kind), model(kind)
    names = add_lora_(found, ATTENTION[kind], rank=2, seed=1)
    assert len(names) == adapted
    assert not [name for name in names if "attn" in name or name == "lm_head"]
    assert torch.equal(logits(found), logits(original))  # B begins with zeros
    for parameter in found.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    trained = logits(found)
    assert not torch.allclose(trained, logits(original), atol=1e-2)
    merge_lora_(found)
    torch.testing.assert_close(logits(found), trained, rtol=1e-4, atol=1e-4)
    assert list(found.state_dict()) == list(original.state_dict())
    assert not hasattr(found, "peft_config")
    assert all(parameter.requires_grad for parameter in found.parameters())


def test_one_seed_gives_the_same_adapters_and_leaves_the_random_state_alone():
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    first, second, other = (copy.deepcopy(model("llama")) for _ in range(3))
    for found, seed in ((first, 1), (second, 1), (other, 2)):
        add_lora_(found, ATTENTION["llama"], rank=2, seed=seed)
    assert same_state(first.state_dict(), second.state_dict())
    assert not same_state(first.state_dict(), other.state_dict())
    assert torch.equal(torch.rand(1), wanted)


def test_in_a_handover_students_and_adapters_train_alone():
    found = model("llama")
    add_lora_(found, ATTENTION["llama"], rank=2)
    plan = segue.methods.dcr(sites=ATTENTION["llama"], student=segue.students.WindowedLinear(window=4), train="all")
    handover = segue.replace_(found.train(), plan, total_steps=4)
    kinds = handover.parameter_kinds()
    backbone = [name for name, kind in kinds.items() if kind == "backbone"]
    assert len(backbone) == 12
    assert all("lora_" in name for name in backbone)
    assert {"new", "copied"} <= set(kinds.values())


def test_a_model_without_layers_around_its_sites_is_refused():
    only = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(HandoverError, match="LoRA has no layer to adapt"):
        add_lora_(only, "0", rank=1)
