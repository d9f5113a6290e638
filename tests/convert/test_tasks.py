"""Tasks of a conversion: the scores are those that transformers' own losses give."""

from __future__ import annotations

import math

import pytest
import torch

import segue
from segue.convert import data, tasks
from segue.convert.pretrained import open_base
from segue.training.tasks import quality_of
from tests.convert.small_models import epoch, model, scores, settings


def test_the_perplexity_of_a_causal_model_is_that_of_transformers(base, texts):
    opened = open_base(str(base("llama")))
    found = data.load(opened, settings(texts))
    losses, tokens = 0.0, 0
    with torch.no_grad():
        for batch in found.held_out:
            ids = batch["input_ids"]
            losses += opened.model(input_ids=ids, labels=ids).loss.item() * ids.numel()
            tokens += ids.numel()
    assert tokens == 16 * round(0.1 * (found.train.count + tokens // 16))
    assert found.task.of(scores(opened, found)) == pytest.approx(math.exp(losses / tokens), rel=1e-6)


@pytest.mark.parametrize(
    ("task", "shown"),
    [(tasks.NextToken(), "perplexity 8"), (tasks.HiddenToken(), "perplexity 8"), (tasks.Labels(), "accuracy 0.02 %")],
)
def test_progress_shows_the_score_by_which_a_task_is_judged(task, shown):
    """Of a language model the perplexity: its accuracy is 0.000 to three digits for long."""
    assert quality_of(task, {"loss": math.log(8), "accuracy": 0.0002}) == shown
    assert quality_of(task, {}) == "", "before the first evaluation"


def test_the_perplexity_of_a_masked_model_is_that_of_transformers(base, texts):
    """Over all hidden tokens, each of which counts once."""
    opened = open_base(str(base("masked")))
    found = data.load(opened, settings(texts, batch=5))
    losses, tokens = 0.0, 0
    with torch.no_grad():
        for batch in found.held_out:
            hidden = int((batch["labels"] != -100).sum())
            assert hidden == int((batch["input_ids"] == 3).sum()) > 0
            losses += opened.model(**batch).loss.item() * hidden
            tokens += hidden
    assert found.task.of(scores(opened, found)) == pytest.approx(math.exp(losses / tokens), rel=1e-6)
    assert [batch["labels"].tolist() for batch in found.held_out] == [batch["labels"].tolist() for batch in found.held_out]
    assert not torch.equal(epoch(found, 0)[0]["labels"], epoch(found, 1)[0]["labels"])


def test_an_encoder_is_evaluated_by_the_cosine_to_its_own_embeddings(base, sources):
    opened = open_base(str(base("encoder")))
    found = data.load(opened, settings(sources["encoder"]))
    assert found.task.of(scores(opened, found)) == pytest.approx(1.0)
    other = open_base(str(base("encoder")))
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()).reshape(parameter.shape))
        cosines = []
        for batch in found.held_out:
            mask = batch["attention_mask"][..., None]
            inputs = {name: x for name, x in batch.items() if name != "targets"}
            means = [(m(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1) for m in (opened.model, other.model)]
            cosines += torch.nn.functional.cosine_similarity(*means).tolist()
    assert found.task.of(scores(other, found)) == pytest.approx(sum(cosines) / len(cosines), abs=1e-6)
    assert abs(sum(cosines) / len(cosines)) < 0.99


@pytest.mark.parametrize("kind", ["llama", "masked", "labels"])
def test_the_distance_from_the_original_is_that_of_a_naive_loop(base, texts, sources, kind):
    opened = open_base(str(base(kind)))
    found = data.load(opened, settings(sources.get(kind, texts), batch=3))
    other, original = model(kind, seed=5), opened.model
    batch = next(iter(found.held_out))
    with torch.no_grad():
        scored = found.task.scores(other, batch, original)
        assert scored["loss"].tolist() == pytest.approx(found.task.scores(other, batch)["loss"].tolist())
        for i in range(3):
            inputs = {name: x[i : i + 1] for name, x in batch.items() if name != "labels"}
            p, q = (each(**inputs).logits[0].double().softmax(-1) for each in (original, other))
            if kind == "llama":
                p, q = p[:-1], q[:-1]
            elif kind == "masked":
                p, q = p[batch["labels"][i] != -100], q[batch["labels"][i] != -100]
            assert scored["kl"][i].item() == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), rel=1e-3)
            assert scored["same_first_choice"][i].item() == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())


@pytest.mark.parametrize("shares", [True, False])
def test_a_frozen_copy_stays_the_original_while_modules_are_replaced_and_train(shares):
    trained = model("qwen")  # its embeddings are tied
    ids = torch.randint(4, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = trained(input_ids=ids).logits
    copied = tasks.frozen_copy(trained, shares=shares)
    memory = {p.data_ptr() for p in trained.parameters()} & {p.data_ptr() for p in copied.parameters()}
    assert len(memory) == (len(list(trained.parameters())) if shares else 0)
    plan = segue.methods.dcr(
        sites="**.self_attn", student=segue.students.LinearAttention(), train="students" if shares else "all"
    )
    handover = segue.replace_(trained.train(), plan, total_steps=2)
    optimizer = torch.optim.SGD(handover.parameters(), lr=0.1)
    for _ in range(2):
        trained(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        handover.step()
    handover.finalize_()
    with torch.no_grad():
        assert torch.equal(copied(input_ids=ids).logits, expected)
        assert not torch.allclose(trained.eval()(input_ids=ids).logits, expected, atol=1e-3)
    assert not any(p.requires_grad for p in copied.parameters())
