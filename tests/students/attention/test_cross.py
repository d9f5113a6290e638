"""Cross-attention: every operator that can, against an explicit reference; encoder-decoders generate the same with a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import segue
from segue.errors import StudentError
from segue.students import Fourier, LinearAttention, Linformer, Nystrom, Performer, SlidingWindow, Softmax, WindowedLinear
from segue.students.attention.mixer import Mixer
from segue.students.attention.mixers.linear import LinearMixer
from segue.students.attention.mixers.linformer import LinformerMixer
from segue.students.attention.mixers.nystrom import NystromMixer
from segue.students.attention.mixers.performer import PerformerMixer
from segue.students.attention.mixers.softmax import SoftmaxMixer
from segue.students.attention.module import Operator
from tests.helpers import models
from tests.students import cases
from tests.students.attention.encoders import READ, Encoder

pytestmark = pytest.mark.filterwarnings("ignore:.* leaves the position bias:segue.errors.SegueWarning")

HEADS, SIZE, LANDMARKS, RANK, LONGEST = 4, 8, 3, 4, 16
SCALE = SIZE**-0.5


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# Mixers, one row of one head at a time


def by_weights(weights: Tensor, v: Tensor) -> Tensor:
    return (weights / weights.sum()) @ v


def softmax(mixer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return by_weights((SCALE * k @ q).exp(), v)


def linear(mixer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return by_weights((F.elu(k) + 1) @ (F.elu(q) + 1), v)


def performer(mixer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def features(x: Tensor) -> Tensor:
        x = SCALE**0.5 * x
        return (mixer.directions @ x - x @ x / 2).exp()

    return by_weights(torch.stack([features(key) for key in k]) @ features(q), v)


def linformer(mixer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (SCALE * mixer.of_keys[:, : len(k)] @ k @ q).softmax(0) @ (mixer.of_values[:, : len(v)] @ v)


def nystrom(mixer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if len(k) <= LANDMARKS:
        return softmax(mixer, q, k, v)
    segment = torch.arange(len(k)) * LANDMARKS // len(k)
    landmarks = torch.stack([k[segment == i].mean(0) for i in range(LANDMARKS)])
    between = (SCALE * landmarks @ landmarks.T).softmax(-1)
    return (SCALE * landmarks @ q).softmax(-1) @ torch.linalg.pinv(between) @ (SCALE * landmarks @ k.T).softmax(-1) @ v


Reference = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
MIXERS: dict[str, tuple[Callable[[], Mixer], Reference]] = {
    "softmax": (lambda: SoftmaxMixer(SCALE), softmax),
    "linear": (lambda: LinearMixer("elu", HEADS, HEADS, SIZE), linear),
    "performer": (lambda: PerformerMixer(32, SIZE, SCALE), performer),
    "linformer": (lambda: LinformerMixer(RANK, LONGEST, SCALE), linformer),
    "nystrom": (lambda: NystromMixer(LANDMARKS, 20, SCALE), nystrom),
}


@pytest.mark.parametrize(("queries", "keys"), [(1, 9), (5, 2), (9, 9), (5, 12)])
@pytest.mark.parametrize("name", MIXERS)
def test_across_two_sequences_it_is_its_formula(name: str, queries: int, keys: int) -> None:
    torch.manual_seed(0)
    make, reference = MIXERS[name]
    mixer = make()
    assert mixer.supports_cross
    q, k, v = (torch.randn(2, HEADS, n, SIZE) for n in (queries, keys, keys))
    y = mixer(q, k, v, cross=True)
    for index in ((0, 0, 0), (1, 3, queries - 1)):
        batch, head, _ = index
        close(y[index], reference(mixer, q[index], k[batch, head], v[batch, head]))


@pytest.mark.parametrize("name", MIXERS)
def test_padding_belongs_to_the_keys_and_queries_do_not_see_each_other(name: str) -> None:
    torch.manual_seed(0)
    mixer = MIXERS[name][0]()
    q, k, v = (torch.randn(2, HEADS, 9, SIZE) for _ in range(3))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    y = mixer(q, k, v, mask, cross=True)
    assert y.abs().min() > 0, "queries beside padding have an output too"
    padding = ~mask[:, None, :, None]
    close(mixer(q, k.masked_fill(padding, 50.0), v.masked_fill(padding, 50.0), mask, cross=True), y)
    close(torch.cat([mixer(q[:, :, i : i + 1], k, v, mask, cross=True) for i in range(9)], dim=2), y)


# Sites


SITES = {
    "bart": "decoder.layers.0.encoder_attn",
    "t5": "decoder.block.0.layer.1.EncDecAttention",
    "detr": "decoder.layers.0.encoder_attn",
}


def encoder_of(kind: str) -> Encoder:
    return next(e for e in READ if e.kind == kind)


@pytest.mark.parametrize("operator", [SlidingWindow(), WindowedLinear(), Fourier()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("kind", SITES)
def test_operators_that_mix_one_sequence_are_refused_at_sites_of_two(kind: str, operator: Operator) -> None:
    model = encoder_of(kind).build()
    before = str(model)
    with pytest.raises(StudentError, match=f"{type(operator).__name__} cannot be cross-attention"):
        segue.replace_(model, segue.Plan(sites=SITES[kind], student=operator), total_steps=2)
    assert str(model) == before


def test_they_are_refused_in_the_first_call_where_names_say_nothing() -> None:
    teacher = nn.MultiheadAttention(32, 4, batch_first=True)
    student, x, other = SlidingWindow()(teacher, segue.Site("here")), torch.randn(2, 6, 32), torch.randn(2, 5, 32)
    with pytest.raises(StudentError, match="SlidingWindow cannot be cross-attention"):
        student(x, other, other)


@pytest.mark.parametrize(
    "operator", [Performer(features=16), Linformer(rank=4, tokens=12), Nystrom(landmarks=3)], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_other_operators_run_and_train_across(kind: str, operator: Operator) -> None:
    encoder = encoder_of(kind)
    model = encoder.build().train()
    plan = segue.Plan(sites=encoder.cross, student=operator, schedule=segue.schedules.Linear())
    handover = segue.replace_(model, plan, total_steps=2)
    handover.step()
    encoder.output(model).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in handover.parameters())
    handover.finalize_(force=True)
    call = encoder.call()
    expected = encoder.output(model.eval(), call)
    other = {**call, "input_ids": torch.where(call["attention_mask"].bool(), call["input_ids"], 7)}
    close(encoder.output(model, other), expected)


# Generation


GENERATING = {
    "t5": transformers.T5ForConditionalGeneration,
    "bart": transformers.BartForConditionalGeneration,
    "whisper": transformers.WhisperForConditionalGeneration,
}
LINEAR = LinearAttention(ignore=("bias",))


def generating(kind: str) -> nn.Module:
    encoder = encoder_of(kind)
    config = transformers.AutoConfig.for_model(kind, **{**encoder.settings, "eos_token_id": None, "tie_word_embeddings": False})
    model = models.build(lambda: GENERATING[kind]._from_config(config)).eval()
    model.generation_config.update(eos_token_id=None, forced_eos_token_id=None, max_length=None)
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0)))
    return model


def generated(model: nn.Module, call: dict[str, Any], **settings: Any) -> Tensor:
    call = {name: value for name, value in call.items() if name != "decoder_input_ids"}
    settings = {"max_new_tokens": 9, "do_sample": False, **settings}
    return transformers.GenerationMixin.generate(model, **call, **settings)


def agree(model: nn.Module, call: dict[str, Any], **settings: Any) -> None:
    whole, cached = (generated(model, call, use_cache=use, **settings) for use in (False, True))
    assert torch.equal(cached, whole)
    assert len(cached[:, 1:].unique()) > 1, "one token again and again proves nothing"


def sites_of(encoder: Encoder, which: str) -> str:
    own = encoder.sites if encoder.kind != "t5" else "**.decoder.**.SelfAttention"
    own = own.replace("**.self_attn", "**.decoder.**.self_attn")
    return {"self": own, "cross": encoder.cross, "both": f"{{{own},{encoder.cross}}}"}[which]


CHOICES = [
    ("self", LINEAR),
    ("self", SlidingWindow(window=2)),
    ("cross", LINEAR),
    ("cross", Nystrom(landmarks=3)),
    ("both", LINEAR),
]


@pytest.mark.parametrize(("which", "operator"), CHOICES, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
@pytest.mark.parametrize("kind", GENERATING)
def test_a_cache_changes_no_token(kind: str, which: str, operator: Operator) -> None:
    encoder, model = encoder_of(kind), generating(kind)
    plan = segue.Plan(sites=sites_of(encoder, which), student=operator, schedule=segue.schedules.Linear())
    handover = segue.replace_(model, plan, total_steps=2)
    handover.step()
    model.eval()
    agree(model, encoder.call())
    handover.finalize_(force=True)
    agree(model, encoder.call())


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_beam_search_takes_states_and_keys_along(kind: str) -> None:
    encoder, model = encoder_of(kind), generating(kind)
    plan = segue.Plan(sites=sites_of(encoder, "both"), student=LINEAR)
    segue.replace_(model, plan, total_steps=2).finalize_(force=True)
    agree(model, encoder.call(), num_beams=2)


@torch.no_grad()
def test_the_first_layer_of_t5_returns_its_bias_also_where_it_ignores_it() -> None:
    encoder = encoder_of("t5")
    expected = encoder.build()
    expected.encoder.block[0].layer[0].SelfAttention = Softmax(ignore=("bias",))(
        expected.encoder.block[0].layer[0].SelfAttention, segue.Site("x")
    )
    model = encoder.build()
    bias = model.encoder.block[0].layer[0].SelfAttention.compute_bias(7, 7)
    seen = expected.encoder.block[0].layer[0].SelfAttention(torch.randn(3, 7, 32))
    close(seen[1], bias)
    assert (encoder.output(expected) - encoder.output(model)).abs().max() > 1e-3


@torch.no_grad()
def test_the_cross_attention_of_gpt2_has_queries_apart() -> None:
    model = models.build(lambda: models.gpt2(add_cross_attention=True, **cases.CALM_GPT2)).eval()
    mask = torch.ones(3, 5, dtype=torch.long)
    mask[1, 3:] = 0
    call = {"input_ids": models.token_ids(), "encoder_hidden_states": torch.randn(3, 5, 32), "encoder_attention_mask": mask}
    expected = model(**call).logits
    with pytest.raises(StudentError, match="SlidingWindow cannot be cross-attention"):
        segue.replace_(model, segue.Plan(sites="transformer.h.*.crossattention", student=SlidingWindow()), total_steps=2)
    plan = segue.Plan(sites="transformer.h.*.{attn,crossattention}", student=Softmax())
    segue.replace_(model, plan, total_steps=2).finalize_(force=True)
    close(model(**call).logits, expected)
