"""Tasks: losses and scores of classification, on pairs and on mappings."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import BatchEncoding

import segue
from segue.core.blending import padding_mask
from segue.errors import DataError
from segue.training.tasks import Classification, task_loss
from tests.helpers.tiny import SITES, Net, batch, same_bits


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_cross_entropy_is_torchs_with_its_label_smoothing(smoothing):
    x, y = batch()
    model = Net()
    wanted = F.cross_entropy(model(x), y, label_smoothing=smoothing)
    assert torch.equal(Classification(label_smoothing=smoothing)(model, (x, y)), wanted)
    scores = Classification(label_smoothing=smoothing).scores(model, (x, y))
    assert torch.equal(scores["loss"], F.cross_entropy(model(x), y, reduction="none"))  # never smoothed
    assert torch.equal(scores["accuracy"], (model(x).argmax(-1) == y).float())


class Counted(Classification):
    """A task that can run the model without its loss."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __call__(self, model, batch):
        self.calls.append("loss")
        return super().__call__(model, batch)

    def forward_only(self, model, batch):
        self.calls.append("forward")
        return model(batch[0])


DISTILLED = segue.losses.LogitDistillation()
TASKS = [
    ("forward", {"distill": DISTILLED}, {"task": 0.0}),
    ("loss", {"distill": DISTILLED}, {"task": 0.5}),
    ("loss", {"distill": DISTILLED}, {"task": 0.0, "distill": 0.0}),  # a gradient of 0 is one
    ("loss", {"guidance": segue.losses.FeatureGuidance()}, {"task": 0.0, "guidance": 1.0}),
    ("loss", {}, {}),
]


@pytest.mark.parametrize(("called", "losses", "phase"), TASKS)
def test_the_loss_of_a_task_is_left_out_where_distillation_alone_counts(called, losses, phase):
    """The students learn the same, bit for bit."""
    plan = segue.Plan(sites=SITES, phases=(segue.phases.Phase(name="alone", **phase),), **losses)
    weights = []
    for task in (Counted(), Classification()):
        fitted = segue.fit(Net(), plan, [batch()], task, recipe=segue.Recipe(steps=3, lr=1e-2), progress=None)
        weights.append(fitted.model.state_dict())
        if isinstance(task, Counted):
            assert task.calls == [called] * 3
    assert all(same_bits(weights[0][name], weights[1][name]) for name in weights[1])


def test_without_a_handover_the_loss_is_the_task_s():
    assert task_loss(Counted(), Net(), batch(), None).requires_grad


class Sentences(nn.Module):
    """Called and answering as Hugging Face models are."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, *, input_ids, attention_mask):
        hidden = (input_ids * attention_mask).float()
        return SimpleNamespace(logits=self.linear(hidden))


@pytest.mark.parametrize("kind", [dict, BatchEncoding])
def test_mappings_with_labels_are_called_by_keyword(kind):
    model = Sentences()
    ids, mask, labels = torch.arange(12).view(3, 4), torch.ones(3, 4), torch.tensor([0, 2, 1])
    given = kind({"input_ids": ids, "labels": labels, "attention_mask": mask})
    assert torch.equal(Classification()(model, given), F.cross_entropy(model.linear(ids.float()), labels))
    assert set(given) == {"input_ids", "labels", "attention_mask"}
    assert padding_mask(given) is mask


def test_several_inputs_may_stand_before_the_labels():
    x, y = batch()

    class Sum(Net):
        def forward(self, a, b):
            return super().forward(a + b)

    assert torch.equal(Classification()(Sum(), (x, x, y)), F.cross_entropy(Net()(2 * x), y))


def test_only_a_two_dimensional_mask_is_a_padding_mask():
    assert padding_mask(batch()) is None
    assert padding_mask({"input_ids": torch.ones(2, 3)}) is None
    assert padding_mask({"attention_mask": torch.ones(2, 1, 3, 3)}) is None


def test_a_tensor_is_no_batch_of_inputs_and_labels():
    with pytest.raises(DataError, match=r"needs batches of inputs and labels.\n  A batch is a tensor of shape \(4, 8\)."):
        Classification()(Net(), torch.zeros(4, 8))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, "a NoneType"),
        (3.5, "a float"),
        ("text", "a str"),
        (b"xy", "a bytes"),
        ([], "a list"),
        ((torch.zeros(2, 5, 8),), "a tuple of Tensor"),
        ((torch.zeros(2, 5, 8), "cat"), "a tuple of Tensor, str"),
        ({"x": torch.zeros(2, 5, 8)}, "a dict of x"),
    ],
)
def test_a_batch_without_labels_is_described(given, found):
    for use in (Classification(), Classification().scores):
        with pytest.raises(DataError, match=rf"needs batches of inputs and labels.\n  A batch is {found}\."):
            use(Net(), given)
