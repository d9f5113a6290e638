"""Linformer: its settings, its formula, and the length that it must know."""

import pytest
import torch

import segue
from segue.errors import PlanError, StudentError
from segue.students import Linformer
from tests.students.attention.mixers.checks import assert_naive_for_large_logits, attention_spec, inputs
from tests.students.attention.mixers.formulas import logits, prepared, softmax_weights

SETTINGS = {"linformer": Linformer(rank=5)}
IN_MODELS = {"Linformer": Linformer(rank=4, tokens=17)}
STATE_DICT = {"linformer": {"of_keys": (5, 1000), "of_values": (5, 1000)}}
ROWS = [Linformer(), Linformer(tokens=64)]

NEEDS_A_LENGTH = (
    "Linformer needs the length of the longest sequence.\n"
    "  It learns one weight per position, and this model does not say how many positions it has.\n"
    "  Hint: give it: Linformer(rank=64, tokens=197). Nothing was changed."
)


def naive(operator, spec, mixer, q, k, v, token_mask, causal):
    """Attend to the rows E k, and collect the rows F v; every position has its own column."""
    k, v, _, _ = prepared(q, k, v, token_mask, causal)
    tokens = k.shape[2]
    short_k = torch.einsum("rs,bhsd->bhrd", mixer.of_keys[:, :tokens], k)
    short_v = torch.einsum("rs,bhsd->bhrd", mixer.of_values[:, :tokens], v)
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    return softmax_weights(logits(spec, q, short_k), everything) @ short_v


def test_large_logits_are_the_references():
    assert_naive_for_large_logits(naive, SETTINGS["linformer"], False)


def test_it_refuses_more_tokens_than_it_has_positions_for():
    spec = attention_spec(tokens=8)
    q, k, v, _ = inputs(1, spec, 9)
    mixer = Linformer().mixer(spec)
    assert mixer(*(x[:, :, :8] for x in (q, k, v))).isfinite().all()
    with pytest.raises(StudentError) as error:
        mixer(q, k, v)
    assert str(error.value) == (
        "Linformer takes at most 8 tokens, got 9.\n"
        "  It learns one weight per position.\n"
        "  Hint: make it longer: Linformer(tokens=9)."
    )
    assert Linformer(tokens=9).mixer(spec)(q, k, v).isfinite().all()


def test_it_must_know_the_longest_sequence():
    with pytest.raises(StudentError) as error:
        Linformer().mixer(attention_spec(tokens=None))
    assert str(error.value) == NEEDS_A_LENGTH


def test_a_model_without_a_longest_sequence_is_refused_and_unchanged():
    from tests.students.cases import TIMM

    model = TIMM.build()
    before = list(model.modules()), [p.requires_grad for p in model.parameters()]
    with pytest.raises(StudentError) as error:
        segue.replace_(model, TIMM.plan(Linformer()))
    assert str(error.value) == NEEDS_A_LENGTH
    assert before == (list(model.modules()), [p.requires_grad for p in model.parameters()])
    handover = segue.replace_(model, TIMM.plan(Linformer(tokens=9)), total_steps=2)
    with pytest.raises(StudentError, match=r"Linformer takes at most 9 tokens, got 17"):
        TIMM.batch().logits(handover.model)


def test_rows_keep_the_variance_of_what_they_sum():
    torch.manual_seed(0)
    mixer = Linformer(rank=50).mixer(attention_spec(tokens=400))
    for weight in (mixer.of_keys, mixer.of_values):
        assert weight.std().item() == pytest.approx(0.05, rel=0.03)


@pytest.mark.parametrize("settings", [{"rank": -1}, {"tokens": -4}], ids=str)
def test_a_count_must_be_positive(settings):
    with pytest.raises(PlanError, match=r"^Linformer\(\w+=...\) must be a positive integer, got -"):
        Linformer(**settings)
