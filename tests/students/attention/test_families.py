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
from segue.errors import SegueWarning, StudentError
from segue.sites import Site, select
from segue.students import CopyMatching, LinearAttention, SlidingWindow, Softmax
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


def test_a_causal_mask_need_not_be_announced() -> None:
    teacher, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 6, 32)
    models.scramble_(teacher)
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    for student in (Softmax()(teacher, HERE), SlidingWindow(window=6, sinks=0)(teacher, HERE)):
        assert close(student(x, x, x, attn_mask=mask)[0], teacher(x, x, x, attn_mask=mask)[0])
    student = LinearAttention()(teacher, HERE)
    assert torch.equal(student(x, x, x, attn_mask=mask)[0], student(x, x, x, attn_mask=mask, is_causal=True)[0])


def test_equal_tensors_are_one_sequence() -> None:
    teacher, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 6, 32)
    student = SlidingWindow(window=2)(teacher, HERE)
    assert torch.equal(student(x, x.clone(), x.clone())[0], student(x, x, x)[0])


def test_queries_and_keys_with_positions_and_values_without() -> None:
    """DETR adds positions to queries and keys alone."""
    teacher, x, positions = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 6, 32), torch.randn(6, 32)
    models.scramble_(teacher)
    student, q = Softmax()(teacher, HERE), x + positions
    assert close(student(q, q, x)[0], teacher(q, q, x)[0])


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
    ],
    ids=["packed sequences", "pairs of tokens"],
)
def test_a_mask_that_says_more_than_padding_and_the_future_is_refused(family: Family, change) -> None:
    model, batch = family.build(), change(family.batch())
    handover = segue.replace_(model, family.plan(LinearAttention()), total_steps=2)
    with handover.as_student(), pytest.raises(StudentError) as caught:
        batch.predict(model)
    assert str(caught.value) == (
        "LinearAttention cannot apply this mask.\n"
        "  It hides more than padding and the future (packed sequences, blocks, or pairs of tokens).\n"
        "  Hint: leave such masks out, or use SlidingWindow or Softmax at these sites, which apply any mask."
    )


def test_masks_are_looked_into_in_every_call() -> None:
    student, x = LinearAttention()(timm.layers.Attention(32, 4), HERE), torch.randn(2, 6, 32)
    plain = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    packed = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).bool().expand(2, 1, 6, 6)
    student(x, attn_mask=plain)
    with pytest.raises(StudentError, match="cannot apply this mask"):
        student(x, attn_mask=packed)
    plain.copy_(packed)
    with pytest.raises(StudentError, match="cannot apply this mask"):
        student(x, attn_mask=plain)


ODD = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
ANY_MASK = {
    "packed": torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).bool().expand(2, 1, 6, 6),
    "pairs": (ODD > 0.3) | torch.eye(6, dtype=torch.bool),
    "ahead": torch.ones(6, 6, dtype=torch.bool).tril(2),
    "a bias": ODD,
    "a bias and the future": ODD.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf),
}


@pytest.mark.parametrize("mask", ANY_MASK.values(), ids=ANY_MASK)
def test_operators_with_a_softmax_apply_any_mask(mask: Tensor) -> None:
    teacher, x = timm.layers.Attention(32, 4), torch.randn(2, 6, 32)
    models.scramble_(teacher)
    expected = teacher(x, attn_mask=mask)
    for operator in (Softmax(), SlidingWindow(window=6, sinks=0), SlidingWindow(window=6, sinks=2)):
        assert close(operator(teacher, HERE)(x, attn_mask=mask), expected), operator
    with pytest.raises(StudentError, match="LinearAttention cannot apply this mask"):
        LinearAttention()(teacher, HERE)(x, attn_mask=mask)


def test_a_mask_of_pairs_is_not_taken_for_padding_when_there_are_as_many_tokens_as_rows() -> None:
    teacher, x = timm.layers.Attention(32, 4), torch.randn(6, 6, 32)
    mask = torch.ones(6, 6, dtype=torch.bool).tril(2)
    assert close(Softmax()(teacher, HERE)(x, attn_mask=mask), teacher(x, attn_mask=mask))


def test_a_longer_sequence_of_a_windowed_teacher() -> None:
    family = replace(LLAMA.having("HF Mistral", sliding_window=4), make=language_model("mistral"))
    model = family.build().eval()
    with pytest.warns(SegueWarning, match="LinearAttention looks at all tokens, its teacher at 4"):
        handover = segue.replace_(model, family.plan(LinearAttention()), total_steps=2)
    ids = models.token_ids()
    with handover.as_student(), torch.no_grad():
        logits = model(input_ids=ids).logits
        changed = ids.clone()
        changed[:, -1] = (ids[:, -1] + 1) % 50
        assert close(model(input_ids=changed).logits[:, :-1], logits[:, :-1]), "the future is hidden"


# Cross-attention


@pytest.mark.parametrize("length", [5, 6])
def test_cross_attention(length: int) -> None:
    teacher, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 6, 32)
    models.scramble_(teacher)
    other = torch.randn(2, length, 32)
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[1, 3:] = True
    call = {"key_padding_mask": padding}
    assert close(Softmax()(teacher, HERE)(x, other, other, **call)[0], teacher(x, other, other, **call)[0])
    y = LinearAttention()(teacher, HERE)(x, other, other, **call)[0]
    other[1, 3:] = 9.0
    assert close(LinearAttention()(teacher, HERE)(x, other, other, **call)[0], y)
    with pytest.raises(StudentError, match="SlidingWindow cannot be cross-attention"):
        SlidingWindow()(teacher, HERE)(x, other, other)


def test_the_cross_attention_of_a_decoder() -> None:
    model = models.build(cases.decoder_bert, add_cross_attention=True, **cases.CALM_BERT).eval()
    call = {"input_ids": models.token_ids(), "encoder_hidden_states": torch.randn(3, 5, 32)}
    with torch.no_grad():
        expected = model(**call).logits
        plan = segue.Plan(sites="bert.encoder.layer.*.crossattention.self", student=Softmax())
        segue.replace_(model, plan, total_steps=2).finalize_(force=True)
        assert close(model(**call).logits, expected)


def test_the_self_attention_of_a_decoder_with_cross_attention_can() -> None:
    model = models.build(cases.decoder_bert, add_cross_attention=True, **cases.CALM_BERT).eval()
    call = {"input_ids": models.token_ids(), "encoder_hidden_states": torch.randn(3, 5, 32)}
    with torch.no_grad():
        expected = model(**call).logits
        plan = segue.Plan(sites="bert.encoder.layer.*.attention.self", student=Softmax())
        segue.replace_(model, plan, total_steps=2).finalize_(force=True)
        assert close(model(**call).logits, expected)
