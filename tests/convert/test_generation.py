"""Generation compared: continuations are those of a naive loop, and repetition is counted as by hand."""

import pytest
import torch

from segue.convert import generation
from tests.convert.small_models import model, tokenizer


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 300, (5, 14), generator=torch.Generator().manual_seed(3))


def test_continuations_are_those_of_a_naive_loop_whatever_the_models_own_settings_say(ids):
    greedy = model("llama")
    greedy.generation_config.update(do_sample=True, repetition_penalty=5.0, eos_token_id=list(range(300)))
    found = generation.continued(greedy, ids[:2], 6, cached=True)
    expected = ids[:2]
    with torch.no_grad():
        for _ in range(6):
            expected = torch.cat([expected, greedy(input_ids=expected).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, expected[:, 14:])


def test_repetition_is_counted_as_by_hand():
    texts = torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4, 1], [5] * 9, [1, 2, 3, 4, 5, 6, 7, 8, 9]])
    for text, found in zip(texts.tolist(), generation.repetition(texts).tolist(), strict=True):
        earlier, repeated = [], 0
        for i in range(6):
            repeated += text[i : i + 4] in earlier
            earlier.append(text[i : i + 4])
        assert found == pytest.approx(repeated / 6)
    assert generation.distinct(texts.tolist(), 1) == 9 / 27
    assert generation.repetition(torch.tensor([[7, 7]])).tolist() == [0.0]  # shorter than what counts as repeated


@torch.no_grad()
def test_what_the_original_thinks_of_each_text_is_that_of_a_naive_loop(ids):
    models = {"original": model("llama", 0), "converted": model("llama", 1)}
    found = generation.compare(models, ids, tokenizer(), lambda text: None)
    for side, each in models.items():
        losses = []
        for prompt in ids[:, :7]:
            text, loss = prompt[None], 0.0
            for _ in range(7):
                token = each(input_ids=text).logits[:, -1].argmax(-1, keepdim=True)
                loss -= models["original"](input_ids=text).logits[0, -1].log_softmax(-1)[token[0, 0]].item() / 7
                text = torch.cat([text, token], dim=1)
            losses.append(loss)
        expected = torch.tensor(losses).mean().exp().item()
        assert found["perplexity_by_the_original"][side]["mean"] == pytest.approx(expected, rel=1e-4)
    assert found["cache_agreement"] == {"mean": 1.0, "low": pytest.approx(0.51, abs=0.01), "high": 1.0, "n": 4}


def test_a_sample_is_the_text_of_both_continuations():
    reads = tokenizer()
    prompt, original, converted = (
        torch.tensor(reads.encode(text, add_special_tokens=False)) for text in ("one two", " three four", " three six")
    )
    count = min(len(original), len(converted))
    found = generation._sample(reads, prompt, original[:count], converted[:count])
    assert found["prompt"] + found["equal"] + found["original"] == reads.decode(torch.cat([prompt, original[:count]]))
    assert found["prompt"] + found["equal"] + found["converted"] == reads.decode(torch.cat([prompt, converted[:count]]))
    assert found["equal"] == " three"
    assert 0 < found["equal_tokens"] < count
