"""Nested state and tensors: what is taken apart comes back as it was."""

import json

import pytest
import torch
from torch import nn

import segue
from segue.checkpoint import packing
from segue.errors import CheckpointError
from tests.checkpoint.test_state import rig
from tests.helpers.tiny import SITES, Net, batch, optimizer_for, same_bits, train


def test_a_tree_comes_back_with_its_tensors_and_types():
    tree = {0: {"step": torch.tensor(3.0), "betas": (0.9, 0.99)}, "names": ["a", None, True], "empty": {}}
    bag = packing.TensorBag({})
    written = json.loads(json.dumps(bag.pack(tree, "optimizer")))
    assert list(bag.tensors) == ["optimizer/0/step"]
    back = bag.unpack(written, "optimizer")
    assert torch.equal(back[0].pop("step"), tree[0].pop("step"))
    assert back == tree


@pytest.mark.parametrize("data", [{"set": [1]}, {"dict": [["a", {"lists": []}]]}])
def test_a_part_of_an_unknown_kind_is_damage(data):
    with pytest.raises(ValueError, match="unknown kind '(set|lists)'"):
        packing.TensorBag({}).unpack(data, "optimizer")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"dict": [["b", {"tensor": "a/b"}]]}, "a/c is in no place"),
        ({"dict": [["b", {"tensor": "a/c"}], ["c", {"tensor": "a/b"}]]}, "'a/c' at the place of the tensor a/b"),
        ({"dict": [["b", {"tensor": "a/b"}], ["c", {"tensor": "a/c"}], [1, 2], [True, 2]]}, "the same name twice"),
        ({"list": {"b": 1}}, "a has a list of {'b': 1}"),
    ],
)
def test_every_tensor_is_at_the_place_that_its_name_says(data, says):
    with pytest.raises(ValueError, match=says):
        packing.TensorBag({"a/b": torch.ones(2), "a/c": torch.ones(2), "ab": torch.ones(2)}).unpack(data, "a")


def test_an_optimizer_state_that_is_no_plain_data_is_refused(tmp_path):
    handover, optimizer, _ = rig("blend")
    optimizer.param_groups[0]["note"] = object()
    with pytest.raises(CheckpointError, match="optimizer/param_groups/0/note cannot be saved as plain data"):
        segue.save(handover, tmp_path, optimizer=optimizer)
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_named_before_anything_is_copied():
    targets = {"model/a": torch.zeros(2), "model/b": torch.zeros(3)}
    with pytest.raises(CheckpointError) as error:
        packing.require_same_shapes(targets, {"model/a": torch.zeros(2), "model/b": torch.zeros(4)})
    assert str(error.value) == (
        "the tensor b of the checkpoint does not fit the model.\n"
        "  The model has (3,) there, the checkpoint has (4,).\n"
        "  Hint: build the same model with the same plan first. Nothing was changed."
    )
    with pytest.raises(CheckpointError, match="the checkpoint has nothing"):
        packing.require_same_shapes(targets, {"model/a": torch.zeros(2)})


def test_state_that_is_not_a_tensor_is_refused():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"note": 1}

    with pytest.raises(CheckpointError, match="Extra cannot be saved as tensors"):
        packing.tensor_state(Extra(2, 2))


def test_tied_weights_are_saved_once(tmp_path):
    class Tied(Net):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed=seed)
            self.blocks[2].mlp[0].weight = self.blocks[0].mlp[0].weight

    handover = segue.replace_(Tied().train(), segue.Plan(sites=SITES), total_steps=5)
    train(handover, optimizer_for(handover), 5)
    model = handover.finalize_()
    segue.save(model, tmp_path)
    fresh = segue.load_(Tied(seed=4).train(), tmp_path)
    assert fresh.blocks[2].mlp[0].weight is fresh.blocks[0].mlp[0].weight
    assert same_bits(fresh(batch()[0]), model(batch()[0]))
