"""Interfaces: every family of attention is parsed and called correctly, proved by a student that equals its teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import segue
from segue.core.backbone import plain_attention
from segue.errors import StudentError
from segue.sites import Site, select
from segue.students import CopyMatching, LinearAttention, Softmax
from segue.students.attention.interfaces import interface_of
from tests.helpers import models
from tests.helpers.models import Batch
from tests.students import cases
from tests.students.cases import BERT, GPT2, LLAMA, TIMM, TORCH, VARIANTS, Family, language_model, real

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")

HERE = Site("here")

every_variant = pytest.mark.parametrize("family", VARIANTS, ids=lambda family: family.name)


def attention(family: Family, layer: int = 0) -> nn.Module:
    model = family.build()
    return model.get_submodule(select(model, family.sites)[layer].name)


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


# Reading


@every_variant
def test_the_spec_is_correct(family: Family) -> None:
    expected = dict(family.spec)
    layer = 1
    module = attention(family, layer)
    _, spec = interface_of(module, HERE)
    if expected["scale"] is None:
        expected["scale"] = 8**-0.5 / (layer + 1)
    projections = {"q": spec.query, "k": spec.key, "v": spec.value, "o": spec.output}
    assert {
        "width": spec.width,
        "heads": spec.heads,
        "key_heads": spec.key_heads,
        "head_size": spec.head_size,
        "biases": "".join(name for name, part in projections.items() if part is not None and part.bias is not None),
        "norms": (spec.query_norm, spec.key_norm) != (None, None),
        "rotary": spec.rotary,
        "causal": spec.causal,
        "scale": pytest.approx(spec.logit_scale),
        "output": spec.output is not None,
        "tokens": spec.tokens,
        "window": spec.window,
    } == expected
    assert spec.layer == (layer if family.causal and family.hugging_face else spec.layer)


def test_dropout_after_the_output_is_read() -> None:
    assert interface_of(attention(TIMM.having("", proj_drop_rate=0.25)), HERE)[1].dropout == 0.25
    assert interface_of(attention(GPT2.having("", resid_pdrop=0.25)), HERE)[1].dropout == 0.25
    assert interface_of(attention(BERT.having("", hidden_dropout_prob=0.25)), HERE)[1].dropout == 0.0


def test_head_sizes_of_their_own_are_read() -> None:
    _, spec = interface_of(timm.layers.Attention(32, num_heads=2, attn_head_dim=8), HERE)
    assert (spec.width, spec.heads, spec.head_size) == (32, 2, 8)
    family = replace(LLAMA.having("", head_dim=16), make=language_model("qwen3"))
    _, spec = interface_of(attention(family), HERE)
    assert (spec.width, spec.heads, spec.key_heads, spec.head_size) == (32, 4, 2, 16)


# A softmax student with the teacher's weights is the teacher


def unpadded(batch: Batch) -> Batch:
    kwargs = {key: value for key, value in batch.kwargs.items() if key not in ("attention_mask", "src_key_padding_mask")}
    labels = batch.labels if batch.mask is None or batch.labels.dim() == 1 else batch.labels.clamp_min(0)
    return replace(batch, kwargs=kwargs, labels=labels, mask=None)


def padded_left(batch: Batch) -> Batch:
    if batch.mask is None:
        return batch
    mask = batch.mask.flip(1)
    kwargs = dict(batch.kwargs)
    if "attention_mask" in kwargs:
        kwargs["attention_mask"] = mask
    else:
        kwargs["src_key_padding_mask"] = mask == 0
    labels = batch.labels if batch.labels.dim() == 1 else batch.labels.flip(0 if batch.labels.shape[1] == len(mask) else 1)
    return replace(batch, kwargs=kwargs, labels=labels, mask=mask)


PADDINGS: dict[str, Callable[[Batch], Batch]] = {"none": unpadded, "right": lambda batch: batch, "left": padded_left}
IMPLEMENTATIONS = [
    pytest.param(family, settings, id=", ".join([family.name, *settings.values()]))
    for family in VARIANTS
    for settings in ([{"attn_implementation": kind} for kind in ("eager", "sdpa")] if family.hugging_face else [{}])
]


@pytest.mark.parametrize(("family", "settings"), IMPLEMENTATIONS)
def test_a_softmax_student_is_its_teacher(family: Family, settings: dict[str, str]) -> None:
    model = family.build(**settings)
    assert not settings or model.config._attn_implementation == settings["attn_implementation"]
    plan = family.plan(Softmax(init=CopyMatching()))
    batches = {name: change(family.batch()) for name, change in PADDINGS.items()}
    modes = (True, False)
    with plain_attention():  # torch's fast path answers NaN to a causal mask with padding on the left
        expected = {(name, mode): logits(model, batches[name], mode) for name in batches for mode in modes}
    handover = segue.replace_(model, plan, total_steps=2)
    with handover.as_student():
        for (name, mode), teacher in expected.items():
            assert close(logits(model, batches[name], mode), teacher), (name, mode)
    handover.finalize_(force=True)
    for (name, mode), teacher in expected.items():
        assert close(logits(model, batches[name], mode), teacher), (name, mode)


@torch.no_grad()
def logits(model: nn.Module, batch: Batch, training: bool) -> Tensor:
    return batch.logits(model.train(training))[real(batch)]


@pytest.mark.parametrize("family", [TIMM, TORCH, BERT, GPT2, LLAMA], ids=lambda family: family.name)
def test_that_proof_can_fail(family: Family) -> None:
    """A teacher whose attention hardly matters would make any student look right."""
    model, batch = family.build(), family.batch()
    expected = logits(model, batch, False)
    handover = segue.replace_(model, family.plan(Softmax(init=segue.students.Kaiming())), total_steps=2)
    with handover.as_student():
        assert (logits(model, batch, False) - expected).abs().max() > 0.1


@pytest.mark.parametrize("family", [TIMM, TORCH, BERT, GPT2, LLAMA], ids=lambda family: family.name)
def test_gradients_to_the_input_and_the_weights_are_the_teachers(family: Family) -> None:
    teachers, students = family.build().train(), family.build().train()
    segue.replace_(students, family.plan(Softmax()), total_steps=2).finalize_(force=True)
    batch = family.batch()
    gradients = []
    for model in (teachers, students):
        model.requires_grad_(True)
        batch.loss(model).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    outside = [name for name in gradients[0] if name in gradients[1]]
    assert len(outside) > 5
    for name in outside:
        torch.testing.assert_close(gradients[1][name], gradients[0][name], rtol=1e-3, atol=1e-5)


def additive(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)


KEPT = torch.arange(6) < torch.tensor([[6], [4]])  # (batch, tokens)
PAIRS = KEPT[:, None, None, :].expand(2, 1, 6, 6)


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"is_causal": True},
        {"attn_mask": PAIRS},
        {"attn_mask": additive(PAIRS)},
        {"attn_mask": KEPT[:, None, None, :]},
    ],
    ids=["plain", "causal", "padding", "additive padding", "one row of padding"],
)
@pytest.mark.parametrize("fused", [True, False])
def test_timm_attention_called_alone(call: dict[str, Any], fused: bool) -> None:
    torch.manual_seed(0)
    teacher = timm.layers.Attention(32, 4, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm).eval()
    teacher.fused_attn = fused
    cases.models.scramble_(teacher)
    student, x = Softmax()(teacher, HERE), torch.randn(2, 6, 32)
    assert close(student(x, **call)[KEPT], teacher(x, **call)[KEPT])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_torch_attention_called_alone(batch_first: bool, bias: bool) -> None:
    torch.manual_seed(0)
    teacher = nn.MultiheadAttention(32, 4, batch_first=batch_first, bias=bias)
    models.scramble_(teacher)
    student, x = Softmax()(teacher, HERE), torch.randn(2, 6, 32)
    x = x if batch_first else x.transpose(0, 1)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    kept = KEPT if batch_first else KEPT.T
    for call in (
        {},
        {"key_padding_mask": ~KEPT},
        {"key_padding_mask": additive(KEPT)},
        {"attn_mask": future, "is_causal": True},
        {"attn_mask": additive(~future), "is_causal": True},
    ):
        (y, weights), (expected, _) = student(x, x, x, need_weights=False, **call), teacher(x, x, x, need_weights=False, **call)
        assert weights is None
        assert close(y[kept], expected[kept]), call


def test_a_causal_mask_that_torch_is_not_told_of_is_refused() -> None:
    """torch's own attention takes such a mask at its word; an operator has to be told that it is causal."""
    student, x = Softmax()(nn.MultiheadAttention(32, 4, batch_first=True), HERE), torch.randn(2, 6, 32)
    with pytest.raises(StudentError, match="It hides more than padding and the future"):
        student(x, x, x, attn_mask=torch.ones(6, 6, dtype=torch.bool).triu(1))


def test_torch_does_not_fuse_a_finalized_student_away() -> None:
    model, batch = TORCH.build(), TORCH.batch()
    segue.replace_(model, TORCH.plan(LinearAttention()), total_steps=2).finalize_(force=True)
    calls: list[nn.Module] = []
    for layer in model.layers:
        layer.self_attn.register_forward_hook(lambda module, *_: calls.append(module))
    batch.predict(model)
    assert len(calls) == 2


# Masks that say more


def packed(batch: Batch) -> Batch:
    """Put two sequences into one row, as position ids that begin again tell Hugging Face's models."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]]).expand(3, -1)
    return replace(batch, kwargs={"input_ids": batch.kwargs["input_ids"], "position_ids": positions, "use_cache": False})


def pairs_of_tokens(batch: Batch) -> Batch:
    mask = torch.ones(3, 1, models.TOKENS, models.TOKENS, dtype=torch.bool)
    mask[:, :, 2, 4] = False
    return replace(batch, kwargs={**batch.kwargs, "attention_mask": mask})


@pytest.mark.parametrize(
    ("family", "change"),
    [
        (LLAMA, packed),
        (BERT, pairs_of_tokens),
        (replace(LLAMA.having("HF Mistral", sliding_window=4), make=language_model("mistral")), unpadded),
    ],
    ids=["packed sequences", "pairs of tokens", "a window"],
)
def test_a_mask_that_says_more_than_padding_and_the_future_is_refused(family: Family, change) -> None:
    model, batch = family.build(), change(family.batch())
    handover = segue.replace_(model, family.plan(LinearAttention()), total_steps=2)
    with handover.as_student(), pytest.raises(StudentError) as caught:
        batch.predict(model)
    assert str(caught.value) == (
        "an attention student cannot apply this mask.\n"
        "  It hides more than padding and the future (packed sequences, a window, or pairs of tokens).\n"
        "  Hint: leave such masks out, or keep softmax attention at these sites."
    )


def test_a_mask_of_pairs_in_a_call_of_timm_is_refused() -> None:
    student, x = LinearAttention()(timm.layers.Attention(32, 4), HERE), torch.randn(2, 6, 32)
    mask = PAIRS.clone()
    mask[:, :, 3, 1] = False
    for given in (mask, additive(mask), mask[0, 0], mask[:, 0, 0].new_ones(6, 6).tril(2)):
        with pytest.raises(StudentError, match="an attention student cannot apply this mask"):
            student(x, attn_mask=given)


def test_a_mask_of_pairs_is_not_taken_for_padding_when_there_are_as_many_tokens_as_rows() -> None:
    student, x = Softmax()(timm.layers.Attention(32, 4), HERE), torch.randn(6, 6, 32)
    with pytest.raises(StudentError, match="an attention student cannot apply this mask"):
        student(x, attn_mask=torch.ones(6, 6, dtype=torch.bool).tril(2))


def test_rows_of_pairs_in_a_call_of_bert_are_refused() -> None:
    student, x = LinearAttention()(attention(BERT), HERE), torch.randn(2, 6, 32)
    with pytest.raises(StudentError, match="an attention student cannot apply this mask"):
        student(x, attention_mask=torch.ones(2, 6, 6, dtype=torch.bool).tril(2))


def test_a_bias_of_the_logits_is_refused() -> None:
    """ALiBi and relative positions come as masks with finite numbers, which are neither padding nor the future."""
    student, x = LinearAttention()(timm.layers.Attention(32, 4), HERE), torch.randn(2, 6, 32)
    distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()
    for bias in (-0.5 * distance, 0.5 * distance):
        with pytest.raises(StudentError, match="an attention student cannot apply this mask"):
            student(x, attn_mask=bias[None, None].expand(2, 1, 6, 6))


def test_a_longer_sequence_with_a_window_is_refused_after_a_short_one_without() -> None:
    family = replace(LLAMA.having("HF Mistral", sliding_window=4), make=language_model("mistral"))
    model = family.build().eval()
    handover = segue.replace_(model, family.plan(LinearAttention()), total_steps=2)
    ids = models.token_ids()
    mask = torch.ones(3, 4, dtype=torch.long)
    mask[0, 0] = 0
    with handover.as_student(), torch.no_grad():
        model(input_ids=ids[:, :4], attention_mask=mask)
        with pytest.raises(StudentError, match="an attention student cannot apply this mask"):
            model(input_ids=ids)


# Cross-attention


def test_cross_attention_is_refused() -> None:
    student, x = LinearAttention()(nn.MultiheadAttention(32, 4, batch_first=True), HERE), torch.randn(2, 6, 32)
    other = torch.randn(2, 5, 32)
    with pytest.raises(StudentError, match="got keys or values of another sequence"):
        student(x, other, other)
    for family in (BERT, GPT2):
        student = LinearAttention()(attention(family), HERE)
        with pytest.raises(StudentError, match="got the states of an encoder"):
            student(x, encoder_hidden_states=other)


@pytest.mark.parametrize(
    ("make", "sites"),
    [(models.gpt2, "transformer.h.*.crossattention"), (cases.decoder_bert, "bert.encoder.layer.*.crossattention.self")],
    ids=["GPT-2", "BERT"],
)
def test_the_cross_attention_of_a_decoder_cannot_be_chosen(make: Callable[..., nn.Module], sites: str) -> None:
    model = models.build(make, add_cross_attention=True)
    with pytest.raises(StudentError, match="[Nn]othing was changed"):
        segue.replace_(model, segue.Plan(sites=sites, student=LinearAttention()))


def test_the_self_attention_of_a_decoder_with_cross_attention_can() -> None:
    model = models.build(cases.decoder_bert, add_cross_attention=True, **cases.CALM_BERT).eval()
    call = {"input_ids": models.token_ids(), "encoder_hidden_states": torch.randn(3, 5, 32)}
    with torch.no_grad():
        expected = model(**call).logits
        plan = segue.Plan(sites="bert.encoder.layer.*.attention.self", student=Softmax())
        segue.replace_(model, plan, total_steps=2).finalize_(force=True)
        assert close(model(**call).logits, expected)
