"""Looking at a model: scores over uneven batches, both sides, and nothing changed by it."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import BatchEncoding

import segue
from segue.training.evaluation import Classification, Evaluation, Processes, padding_mask
from tests.helpers.tiny import SITES, Net, batch, constant, same_state, start

ALONE = Processes(torch.device("cpu"))
UNEVEN = [batch(1, size=5), batch(2, size=3), batch(3, size=1)]
EVERYTHING = tuple(torch.cat(parts) for parts in zip(*UNEVEN, strict=True))


def evaluation(batches=UNEVEN, scores=None) -> Evaluation:
    return Evaluation(batches, scores or Classification().scores, ALONE, nullcontext)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_cross_entropy_is_torchs_with_its_label_smoothing(smoothing):
    x, y = batch()
    model = Net()
    wanted = F.cross_entropy(model(x), y, label_smoothing=smoothing)
    assert torch.equal(Classification(label_smoothing=smoothing)(model, (x, y)), wanted)
    scores = Classification(label_smoothing=smoothing).scores(model, (x, y))
    assert torch.equal(scores["loss"], F.cross_entropy(model(x), y, reduction="none"))  # never smoothed
    assert torch.equal(scores["accuracy"], (model(x).argmax(-1) == y).float())


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


def test_only_a_two_dimensional_mask_is_a_padding_mask():
    assert padding_mask(batch()) is None
    assert padding_mask({"input_ids": torch.ones(2, 3)}) is None
    assert padding_mask({"attention_mask": torch.ones(2, 1, 3, 3)}) is None


def test_several_inputs_may_stand_before_the_labels():
    x, y = batch()

    class Sum(Net):
        def forward(self, a, b):
            return super().forward(a + b)

    assert torch.equal(Classification()(Sum(), (x, x, y)), F.cross_entropy(Net()(2 * x), y))


def test_every_example_counts_the_same_whatever_its_batch():
    model = Net().eval()
    found = evaluation()(model)
    x, y = EVERYTHING
    logits = model(x)
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-6)
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == y).double().mean().item(), rel=1e-12)
    whole = evaluation(scores=lambda model, batch: {"loss": Classification()(model, batch)})(model)
    assert whole["loss"] == pytest.approx(found["loss"], rel=1e-6)


def test_an_evaluation_changes_nothing_in_the_model():
    handover = start(dropout=0.5)
    handover.model.blocks[0].mlp.eval()
    modes = [module.training for module in handover.model.modules()]
    weights = {name: tensor.clone() for name, tensor in handover.model.state_dict().items()}
    found = [evaluation()(handover.model), evaluation()(handover.model)]
    found.append(evaluation().of_students(handover)[0])
    assert [module.training for module in handover.model.modules()] == modes
    assert same_state(handover.model.state_dict(), weights)
    assert all(p.grad is None for p in handover.model.parameters())
    assert found[0] == found[1]  # dropout is off
    assert found[2] != found[0]
    assert all(seam.view.value == "blend" and not seam.records for seam in handover.seams.values())


def test_the_students_alone_are_what_the_finished_model_will_be():
    handover = start(segue.Plan(sites=SITES, schedule=constant(0.4)))
    students, alike = evaluation().of_students(handover)
    wanted = handover.similarity(UNEVEN[0][0])
    assert {name: site["cosine"] for name, site in alike.items()} == {name: s.cosine for name, s in wanted.items()}
    assert {name: site["relative_error"] for name, site in alike.items()} == {n: s.relative_error for n, s in wanted.items()}
    blend = evaluation()(handover.model)
    model = handover.finalize_(force=True)
    assert evaluation()(model) == students
    assert blend != students


def test_released_teachers_leave_scores_without_similarity():
    handover = start(segue.Plan(sites=SITES, schedule=constant(0.0), release=True), total_steps=4)
    x, y = batch()
    F.cross_entropy(handover.model(x), y).backward()
    handover.step()
    assert all(seam.teacher is None for seam in handover.seams.values())
    students, alike = evaluation().of_students(handover)
    assert alike == {}
    assert set(students) == {"accuracy", "loss"}


def test_held_out_batches_that_can_be_read_only_once_are_kept():
    once, model = evaluation(iter(UNEVEN)), Net()
    assert once(model) == once(model) == evaluation()(model)
