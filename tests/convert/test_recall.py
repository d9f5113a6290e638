"""Recall: a model that looks everything up answers all questions, one with a window those within it, and others by chance."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from segue.convert import recall
from tests.convert.small_models import model, text, tokenizer

VOCABULARY = 300


class LooksUp:
    """Predict what followed the longest equal context, of at most two tokens, not farther back than a window."""

    config = SimpleNamespace(vocab_size=VOCABULARY)

    def __init__(self, window: int) -> None:
        self.window = window

    def __call__(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, VOCABULARY)
        for row, ids in enumerate(input_ids.tolist()):
            for now in range(len(ids)):
                for before in range(max(0, now - self.window + 1), now):
                    equal = ids[before] == ids[now]
                    deep = equal and before > 0 and ids[before - 1] == ids[now - 1]
                    if equal:
                        logits[row, now, ids[before + 1]] += 1 + 100 * deep
        return SimpleNamespace(logits=logits)


@pytest.fixture(scope="module")
def probes():
    reads = tokenizer()
    ids = torch.tensor(reads(text(300), add_special_tokens=False)["input_ids"])
    every = torch.arange(4, VOCABULARY)  # the words of the text are too few
    return recall.probes(reads, torch.cat([ids, every])[: 16 * 40].view(-1, 16), 64)


def test_every_question_has_its_answer_at_its_distance(probes):
    assert [probe.distance for probe in probes["text"]] == [probe.distance for probe in probes["words"]] == [8, 16, 32]
    assert [probe.distance for probe in probes["associative"]] == [16, 32, 48]
    for probe in (probe for each in probes.values() for probe in each):
        assert probe.ids.shape[1] <= 64
        assert torch.equal(probe.ids.gather(1, probe.earlier), probe.ids.gather(1, probe.places)) or probe.choices is not None
        assert torch.equal(probe.ids.gather(1, probe.earlier + 1), probe.answers)
        if probe.distance is not None:
            assert (probe.places - probe.earlier).float().mean() == probe.distance
        if probe.choices is not None:
            assert all(len(set(row)) == len(row) for row in probe.choices.tolist())
            assert (probe.choices[:, None] == probe.answers[..., None]).any(-1).all()
    lines = probes["retrieval"][0]
    keys = [lines.ids.gather(1, places - 1) for places in (lines.earlier, lines.places)]
    assert torch.equal(*keys)


def test_a_model_that_looks_up_is_right_within_its_window(probes):
    found = recall.compare({"original": LooksUp(64), "converted": LooksUp(20)}, probes)
    del found["text"]  # whose words return more often than in the copy
    for name, kind in found.items():
        for row in kind["rows"]:
            assert row["accuracy"]["original"]["mean"] > 0.85, (name, row)  # random words repeat by chance
            for measure in ("accuracy", "gain"):
                original, converted, difference = (row[measure][which] for which in ("original", "converted", "difference"))
                assert difference["mean"] == pytest.approx(converted["mean"] - original["mean"], abs=1e-5)
                if row["distance"] <= 8:
                    assert converted["mean"] == pytest.approx(original["mean"], rel=0.05)
                elif row["distance"] >= 32:
                    assert difference["high"] < 0
    assert found["words"]["chance"] is None
    assert found["associative"]["chance"] == 1 / 8
    groups = found["retrieval"]["rows"]
    assert all(a["distance"] < b["distance"] and a["questions"] == b["questions"] for a, b in pairwise(groups))
    assert len(groups) == recall.GROUPS


def test_answers_and_gains_are_those_of_a_naive_loop(probes):
    asked, probe = model("llama"), probes["retrieval"][0]
    found = recall.answered(asked, probe)
    with torch.no_grad():
        for i in range(3):
            for j, (place, earlier) in enumerate(zip(probe.places[i].tolist(), probe.earlier[i].tolist(), strict=True)):
                last, first = (asked(input_ids=probe.ids[i : i + 1, : at + 1]).logits[0, -1] for at in (place, earlier))
                answer = probe.ids[i, place + 1]
                best = max(probe.choices[i].tolist(), key=lambda token, last=last: last[token].item())
                assert found["accuracy"][i, j] == (best == answer)
                gain = last.log_softmax(-1)[answer] - first.log_softmax(-1)[answer]
                assert found["gain"][i, j] == pytest.approx(gain.item(), abs=1e-4)
                assert found["loss"][i, j] == pytest.approx(-last.log_softmax(-1)[answer].item(), abs=1e-4)


def test_words_are_single_tokens_of_the_text_and_other_tokens_where_these_are_few():
    reads = tokenizer()
    names = reads.convert_ids_to_tokens(range(VOCABULARY))
    whole = [token for token, name in enumerate(names) if name.startswith("Ġ") and name[1:].isalpha() and len(name) > 3]
    assert 4 <= len(whole) < 4 * recall.PAIRS
    ids = torch.tensor([[*whole, 5, 5, 6, *reads.all_special_ids]])
    assert set(recall.single_words(reads, ids).tolist()) == {*whole, 5, 6} - set(reads.all_special_ids)
    many = SimpleNamespace(
        all_special_ids=[0], convert_ids_to_tokens=lambda ids: [f"\u2581{'abcd'[i % 4] * (1 + i % 5)}" for i in ids]
    )
    found = recall.single_words(many, torch.arange(100))
    assert set(found.tolist()) == {i for i in range(1, 100) if i % 5 >= 2}
