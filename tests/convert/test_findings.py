"""Findings: conversions that look equal by likelihood and fail where they are used are said to be worse in the first table."""

import pytest
import torch
import transformers
from torch import nn

import segue
from segue.convert import compare, evaluation_page, findings, generation, recall
from segue.students.attention.mixer import Mixer
from tests.convert.small_models import model, text, tokenizer
from tests.convert.test_recall import LooksUp

VOCABULARY = 300


class Bigrams(transformers.PreTrainedModel, transformers.GenerationMixin):
    """Continue a token t with t + 1; before every 16th, the way back to the last 16th is nearly as likely, or a little more."""

    config_class = transformers.LlamaConfig

    def __init__(self, back: float) -> None:
        super().__init__(transformers.LlamaConfig(vocab_size=VOCABULARY, hidden_size=8, num_attention_heads=1))
        logits = torch.full((VOCABULARY, VOCABULARY), -8.0)
        for token in range(VOCABULARY):
            logits[token, (token + 1) % VOCABULARY] = 4.0
            if token % 16 == 15:
                logits[token, token - 15] = 4.0 + back
        self.table = nn.Embedding.from_pretrained(logits)

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return {"input_ids": input_ids}

    def forward(self, input_ids, attention_mask=None, **kwargs):
        return transformers.modeling_outputs.CausalLMOutput(logits=self.table(input_ids))


def counting(pieces: int, tokens: int) -> torch.Tensor:
    begins = torch.randint(VOCABULARY, (pieces, 1), generator=torch.Generator().manual_seed(0))
    return (begins + torch.arange(tokens)) % VOCABULARY


def found_in(results, **measured):
    """Return the rows that are marked as worse, if these are the measurements; and that the page shows the mark."""
    changed = {**results, **measured}
    worse = [row.what for row in findings.rows(changed) if row.worse]
    page = evaluation_page.page(changed, [])
    assert page.count('<span class="mark">worse</span>') == len(worse)
    assert all(what in findings.worse(changed) for what in worse)
    return worse


@torch.no_grad()
def test_a_conversion_that_is_equal_by_likelihood_and_repeats_itself_is_worse(results):
    models = {"original": Bigrams(-0.001), "converted": Bigrams(0.001)}
    ids = counting(40, 160)
    read = compare.of_tokens(compare.token_by_token(models, ids))
    assert read["perplexity_ratio"]["mean"] == pytest.approx(1, abs=1e-3)
    assert read["kl"]["mean"] < 1e-4
    assert read["same_first_choice"]["mean"] > 0.93
    greedy = generation.compare(models, ids, tokenizer(), lambda said: None)
    repetition = greedy["repetition"]
    assert repetition["original"]["mean"] == 0
    assert repetition["converted"]["mean"] > 0.5
    worse = found_in(results, **read, greedy=greedy, recall={})
    assert "repeated 4-grams" in worse
    assert "equal with and without cache" not in worse


@torch.no_grad()
def test_a_conversion_that_forgets_is_worse_however_likely_it_finds_the_text(results):
    reads = tokenizer()
    ids = torch.tensor(reads(text(300), add_special_tokens=False)["input_ids"])
    probes = recall.probes(reads, torch.cat([ids, torch.arange(4, VOCABULARY)])[: 16 * 40].view(-1, 16), 64)
    asked = recall.compare({"original": LooksUp(64), "converted": LooksUp(20)}, probes)
    equal = {"perplexity_ratio": {"mean": 1.0, "low": 0.99, "high": 1.01, "n": 9}, "greedy": {**results["greedy"]}}
    worse = found_in(results, **equal, recall=asked)
    assert {"copied words at 32", "associative recall at 48"} <= set(worse)
    assert "copied words at 8" not in worse
    lost = recall.compare({"original": LooksUp(1), "converted": LooksUp(1)}, probes)
    told = {row.what: row.compared for row in findings.rows({**results, "recall": lost})}
    assert told["associative recall at 48, gain"] == "+0.00 nats (+0.00 to +0.00)"  # the original is at chance


@torch.no_grad()
def test_a_conversion_whose_cache_is_broken_is_worse(results):
    models = {"original": model("llama"), "converted": model("llama")}
    plan = segue.Plan(sites="**.self_attn", student=segue.students.LinearAttention())
    segue.replace_(models["converted"], plan, total_steps=1).finalize_(force=True)
    ids = torch.randint(4, 300, (5, 32), generator=torch.Generator().manual_seed(0))
    sound = generation.compare(models, ids, tokenizer(), lambda said: None)
    assert "equal with and without cache" not in found_in(results, greedy=sound)
    for mixer in (module for module in models["converted"].modules() if isinstance(module, Mixer)):
        step = mixer.step
        mixer.step = lambda q, k, v, mask, state, step=step: (-step(q, k, v, mask, state)[0], state)  # it forgets new tokens
    assert "equal with and without cache" in found_in(
        results, greedy=generation.compare(models, ids, tokenizer(), lambda said: None)
    )


@torch.no_grad()
def test_a_conversion_that_returns_nan_is_worse(results):
    models = {"original": model("llama"), "converted": model("llama")}
    models["converted"].lm_head.weight[7] = torch.nan
    read = compare.of_tokens(compare.token_by_token(models, torch.arange(4, 68).view(4, 16)))
    assert "perplexity" in found_in(results, **read)
