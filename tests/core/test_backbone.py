"""Modes: what trains, what stays in evaluation, and what comes back."""

import copy

import pytest
import torch
from torch import nn

import segue
from segue.core.backbone import evaluating, plain_attention
from tests.helpers.tiny import SITES, Net, optimizer_for, same_state, train


def test_train_all_trains_the_backbone_and_leaves_a_users_frozen_part_frozen():
    model = Net().train()
    model.head.requires_grad_(False)
    handover = segue.replace_(model, segue.Plan(sites=SITES, train="all"), total_steps=10)
    names = [name for name, _ in handover.named_parameters()]
    assert "blocks.0.mlp.0.weight" in names
    assert "blocks.0.attn.qkv.weight" in names
    assert not any("teacher" in name or name.startswith("head") for name in names)
    before = copy.deepcopy(model.state_dict())
    train(handover, optimizer_for(handover), 3)
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "blocks.0.mlp.0.weight" in changed
    assert not any(".teacher." in name or name.startswith("head") for name in changed)


def test_of_a_backbone_frozen_in_part_only_the_rest_is_kept_and_saved(tmp_path):
    """A model with adapters (LoRA) is frozen but for them: a checkpoint must not hold the whole of it."""
    model = Net().train()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    handover = segue.replace_(model, segue.Plan(sites=SITES, train="all"), total_steps=10)
    assert list(handover.backbone_that_changes()) == ["head.weight", "head.bias"]
    train(handover, optimizer_for(handover), 3)
    segue.save(handover, tmp_path)
    resumed = Net().train()
    resumed.blocks.requires_grad_(False)
    segue.load_(resumed, tmp_path)
    assert same_state(resumed.state_dict(), model.state_dict())
    assert same_state(handover.cancel_().state_dict(), Net().state_dict())


def test_a_frozen_backbone_keeps_dropout_off_and_statistics_still():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    handover = segue.replace_(model, segue.Plan(sites="3"), total_steps=5)
    model.train()
    assert [m.training for m in model[:3]] == [False] * 3
    assert model.training
    assert model[3].student[1].training
    assert not model[3].teacher[1].training
    statistics = model[1].running_mean.clone()
    model(torch.randn(8, 4))
    assert torch.equal(model[1].running_mean, statistics)
    model.eval()
    assert not any(m.training for m in model.modules())
    handover.cancel_()
    model.train()
    assert all(m.training for m in model.modules())


@pytest.mark.parametrize("settings", [{"backbone": "train"}, {"train": "all"}])
def test_the_backbone_follows_the_mode_when_asked(settings):
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()
    original = copy.deepcopy(model.state_dict())
    handover = segue.replace_(model, segue.Plan(sites="1", **settings), total_steps=5)
    model.train()
    model(torch.randn(8, 4))
    assert not torch.equal(model[0].running_mean, original["0.running_mean"])
    handover.cancel_()
    assert same_state(model.state_dict(), original)


def test_a_model_that_has_changed_its_mode_keeps_the_new_one_everywhere():
    model = Net(dropout=0.5).eval()
    handover = segue.replace_(model, segue.Plan(sites=SITES), total_steps=5)
    model.train()
    assert not model.blocks[0].mlp[2].training  # pinned, as the backbone is
    handover.cancel_()
    assert all(module.training for module in model.modules())


def test_a_cancellation_that_fails_brings_nothing_back():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    handover = segue.replace_(model, segue.Plan(sites="1", train="all"), total_steps=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    trained = copy.deepcopy(model.state_dict())
    handover.backbone._tensors["2.bias"] = torch.zeros(5)  # cannot be copied; what comes before it can
    with pytest.raises(RuntimeError, match="size"):
        handover.cancel_()
    assert same_state(model.state_dict(), trained)


def test_evaluation_restores_each_modules_own_mode():
    model = Net().train()
    model.blocks[1].eval()
    before = [module.training for module in model.modules()]
    with pytest.raises(KeyError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise KeyError
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("enabled", [True, False])
def test_the_fused_path_is_restored(enabled):
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        with plain_attention():
            assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.backends.mha.get_fastpath_enabled() == enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_a_models_own_train_method_survives_a_failed_replacement():
    model = Net()
    model.train = train_method = lambda mode=True: model
    with pytest.raises(ZeroDivisionError):
        segue.replace_(model, segue.Plan(sites=SITES, student=lambda teacher, site: 1 / 0))
    assert model.train is train_method
