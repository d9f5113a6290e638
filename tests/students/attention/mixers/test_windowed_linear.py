"""Windowed linear attention: its settings and its formula; where it is softmax is in test_sliding_window.py."""

import copy
import functools
import math

import pytest
import torch
import torch._dynamo.testing
import transformers
from torch import Tensor, nn

import segue
from segue.errors import PlanError, StudentError
from segue.gates import Noise
from segue.plan import decode, encode
from segue.settings import first_names
from segue.students import FarFactor, LinearAttention, MixedHeads, SlidingWindow, WindowedLinear
from segue.students.attention.mixer import repeat_heads
from segue.students.attention.module import Operator
from tests.helpers.tiny import SITES, constant, start
from tests.students.attention import tiny_attention  # noqa: F401  registers the attention of tiny.Net
from tests.students.attention.mixers.checks import assert_naive_for_large_logits, attention_spec, inputs, mixer_of, padding
from tests.students.attention.mixers.formulas import (
    distance,
    feature_products,
    logits,
    normalised,
    prepared,
    softmax_weights,
    zero,
)

SETTINGS = {
    "windowed": WindowedLinear(window=5),
    "windowed, no sink": WindowedLinear(window=5, sinks=0),
    "windowed, one": WindowedLinear(window=1, sinks=3),
    "windowed, wide": WindowedLinear(window=70, feature_map="elu", sinks=2, far=0.5),
    "windowed, 0.1.0": WindowedLinear(window=5, sinks=0, far=None),
}
IN_MODELS = {"WindowedLinear": WindowedLinear(window=3)}
MAPS = {"of_queries.weight": (6, 7, 7), "of_keys.weight": (2, 7, 7)}
FAR = {"log_far": (6,), "far_of_queries": (6, 7, 1)}
STATE_DICT = dict.fromkeys(SETTINGS, MAPS | FAR) | {
    "windowed, wide": FAR,
    "windowed, 0.1.0": MAPS | {"near_share": (6, 1, 1)},
}


def naive(operator, spec, mixer, q, k, v, token_mask, causal):
    """Weigh by the softmax over window and sinks, and by c f(q_t) . f(k_s) far."""
    if operator.far is None:
        return naive_of_0_1_0(operator, spec, mixer, q, k, v, token_mask, causal)
    k, v, token_mask, seen = prepared(q, k, v, token_mask, causal)
    sink = token_mask & (token_mask.cumsum(1) <= operator.sinks)
    near = seen & ((distance(q.shape[2]).abs() < operator.window) | sink[:, None, None, :])
    far = factor(mixer, q) * feature_products(operator.feature_map, mixer, q, k)
    return normalised(softmax_weights(logits(spec, q, k), near) + far.where(seen & ~near, zero())) @ v


def factor(mixer, q):
    """Return exp(a + b . q) for each query, at most e^10."""
    return torch.einsum("bhtd,hde->bhte", q, mixer.far_of_queries).add(mixer.log_far.view(-1, 1, 1)).clamp_max(10).exp()


def naive_of_0_1_0(operator, spec, mixer, q, k, v, token_mask, causal):
    """Weigh by g exp(logit - largest in the window) near and f(q_t) . f(k_s) far."""
    k, v, _, seen = prepared(q, k, v, token_mask, causal)
    near = seen & (distance(q.shape[2]).abs() < operator.window)
    sharp = logits(spec, q, k).masked_fill(~near & near.any(-1, keepdim=True), -math.inf)
    sharp = (sharp - sharp.amax(-1, keepdim=True)).exp() / (1 + (-mixer.near_share).exp())
    soft = feature_products(operator.feature_map, mixer, q, k)
    return normalised(sharp.where(near, zero()) + soft.where(seen & ~near, zero())) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_large_logits_are_the_references(name, causal):
    assert_naive_for_large_logits(naive, SETTINGS[name], causal)


@pytest.mark.parametrize("kind", ["hedgehog", "elu", "relu"])
def test_far_tokens_start_with_a_share_of_the_weight_of_near_ones(kind):
    """On random queries and keys, whose average near token has 1 / window of the softmax."""
    spec = attention_spec(size=16)
    mixer = WindowedLinear(window=20, far=0.25, feature_map=kind).mixer(spec)
    q, k = torch.randn(2, 1, 6, 500, 16, generator=torch.Generator().manual_seed(0))
    far = mixer.log_far.exp().view(-1, 1, 1) * (
        mixer.of_queries(q) @ repeat_heads(mixer.of_keys(k[:, :2]), 6).transpose(-1, -2)
    )
    assert far.mean().item() == pytest.approx(0.25 / 20, rel=0.1)


def test_the_first_version_started_with_equal_halves():
    assert WindowedLinear(far=None).mixer(attention_spec()).near_share.sigmoid().unique().tolist() == [0.5]


def test_a_count_must_be_positive():
    with pytest.raises(PlanError, match=r"^WindowedLinear\(window=...\) must be a positive integer, got 2.5"):
        WindowedLinear(window=2.5)


def test_files_of_0_1_0_mean_what_they_meant():
    """The settings that came since are not in these files, and their defaults are another operator."""
    saved = {"kind": "students.WindowedLinear", "init": {"kind": "students.CopyMatching"}, "window": 8, "feature_map": "elu"}
    assert decode(saved, "student") == WindowedLinear(window=8, feature_map="elu", sinks=0, far=None)
    now = encode(WindowedLinear(window=8, feature_map="elu", sinks=0, far=None))
    assert first_names(now) == saved
    assert first_names(encode(WindowedLinear(window=8))) != first_names(encode(WindowedLinear(window=8, sinks=0, far=None)))


# The dropout of windows


def test_a_head_that_drops_its_window_sees_itself_and_what_is_not_in_the_window():
    operator, spec = WindowedLinear(window=9, sinks=2, window_dropout=0.5), attention_spec()
    mixer, (q, k, v, _) = mixer_of(operator, spec).double(), (x.double() for x in inputs(4, spec, 100))
    mixer.begin_step(0.0, Noise(0, 3, "here"))
    dropped = torch.tensor([Noise(0, 3, "here").uniform(head) < 0.5 for head in range(6)])
    assert mixer.kept.tolist() == (~dropped).tolist()
    assert 0 < dropped.sum() < 6
    token_mask = padding(100)
    found, real = mixer(q, k, v, token_mask, True), token_mask[:, None, :, None]
    complete = naive(operator, spec, mixer, q, k, v, token_mask, True)
    torch.testing.assert_close(mixer.eval()(q, k, v, token_mask, True) * real, complete * real)

    k, v, token_mask, seen = prepared(q, k, v, token_mask, True)
    sink = (token_mask & (token_mask.cumsum(1) <= 2))[:, None, None]
    window = seen & (distance(100) > -9) & ~sink
    weights = softmax_weights(logits(spec, q, k), window | (seen & sink))
    weights = weights.masked_fill(window & (distance(100) != 0) & dropped[:, None, None], 0.0)
    far = factor(mixer, q) * feature_products("hedgehog", mixer, q, k)
    expected = normalised(weights + far.where(seen & ~window & ~sink, zero())) @ v
    torch.testing.assert_close(found * real, expected * real)


def test_the_dropout_fades_and_follows_the_steps_of_the_handover(tmp_path):
    student = WindowedLinear(window=2, window_dropout=0.8, window_dropout_until=0.5)
    plan = segue.Plan(sites=SITES, student=student, schedule=constant(0.5), seed=3)
    handover, kept = start(plan, total_steps=40), {}
    for step in range(40):
        kept[step] = {name: seam.student.mixer.kept.tolist() for name, seam in handover.seams.items()}
        if step == 7:
            segue.save(handover, tmp_path)
        handover.step()
    for step, by_site in kept.items():
        probability = 0.8 * max(0.0, 1 - step / 20)
        for name, found in by_site.items():
            assert found == [Noise(3, step, name).uniform(head) >= probability for head in range(len(found))]
    assert all(all(heads) for step in range(20, 40) for heads in kept[step].values())
    assert not all(all(heads) for heads in kept[0].values())
    again = start(plan, total_steps=40)
    segue.load_(again, tmp_path)
    assert {name: seam.student.mixer.kept.tolist() for name, seam in again.seams.items()} == kept[7]
    model = again.finalize_(force=True)
    assert all(part.kept.all() for part in model.modules() if hasattr(part, "begin_step"))


@pytest.mark.slow
def test_the_dropout_changes_in_compiled_code_without_another_graph():
    torch._dynamo.reset()
    spec, counted = attention_spec(), torch._dynamo.testing.CompileCounter()
    mixer, (q, k, v, _) = mixer_of(WindowedLinear(window=9, window_dropout=0.5), spec), inputs(1, spec, 100)
    compiled, outputs = torch.compile(mixer, backend=counted, fullgraph=True), []
    for step in range(4):
        mixer.begin_step(0.0, Noise(0, step, "here"))
        outputs.append(compiled(q, k, v, None, True))
        torch.testing.assert_close(outputs[-1], mixer(q, k, v, None, True))
    assert counted.frame_count == 1
    assert not torch.allclose(outputs[0], outputs[1])
    torch._dynamo.reset()


# On a trained model


TOPICS, WORDS = 8, 4


def of_topics(count: int, seed: int) -> Tensor:
    """Draw sequences of 96 tokens: a mark of the beginning, then words of one topic among noise, so that all tokens matter."""
    generator = torch.Generator().manual_seed(seed)
    topic = torch.randint(TOPICS, (count, 1), generator=generator)
    words = topic * WORDS + torch.randint(WORDS, (count, 95), generator=generator)
    noise = torch.randint(TOPICS * WORDS, (count, 95), generator=generator)
    drawn = torch.where(torch.rand(count, 95, generator=generator) < 0.4, words, noise)
    return torch.cat([torch.full((count, 1), TOPICS * WORDS), drawn], dim=1)


def of_neighbours(count: int, seed: int) -> Tensor:
    """Draw sequences in which each token is one more than the last or any other, so that only the last token matters."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.where(
        torch.rand(count, 95, generator=generator) < 0.8, 1, torch.randint(TOPICS * WORDS, (count, 95), generator=generator)
    )
    return torch.cat([torch.full((count, 1), TOPICS * WORDS), steps.cumsum(1) % (TOPICS * WORDS)], dim=1)


@functools.cache
def trained(text) -> nn.Module:
    """Train a small Llama until it has learned what its text is about."""
    transformers.set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=TOPICS * WORDS + 1, num_key_value_heads=2, use_cache=False, **sizes)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(100):
        batch = text(8, step)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < math.log(TOPICS * WORDS) - 0.15
    return model.eval()


def divergence(text, student: Operator, fitted: bool = False) -> float:
    """Return the KL divergence of a trained model with untrained students from itself, on text that it has not seen."""
    original, batch = trained(text), text(32, 1000)
    plan = segue.Plan(sites="model.layers.*.self_attn", student=student)
    handover = segue.replace_(copy.deepcopy(original), plan, total_steps=1)
    if fitted:
        errors = handover.calibrate([text(8, 2000), text(8, 2001)], FarFactor())
        assert all(error.after < error.before for error in errors.values())
    with torch.no_grad(), handover.as_student() as swapped:
        log_p, log_q = (model(batch).logits.log_softmax(-1) for model in (original, swapped))
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()


@pytest.mark.parametrize("settings", [{"window": 4, "sinks": 1}, {"window": 16, "sinks": 4}], ids=str)
@pytest.mark.parametrize("text", [of_topics, of_neighbours])
def test_the_untrained_swap_is_not_worse_than_to_throw_the_far_part_away(text, settings):
    thrown_away = divergence(text, SlidingWindow(**settings))
    started = divergence(text, WindowedLinear(**settings))
    assert divergence(text, WindowedLinear(**settings), fitted=True) <= started <= thrown_away


def test_far_factors_are_fitted_in_mixtures_and_refused_elsewhere():
    model = copy.deepcopy(trained(of_topics))
    mixed = MixedHeads(operator=WindowedLinear(window=4), keep=(1,))
    handover = segue.replace_(model, segue.Plan(sites="model.layers.0.self_attn", student=mixed), total_steps=1)
    mixer = handover.seams["model.layers.0.self_attn"].student.mixer.others
    before = mixer.log_far.clone()
    handover.calibrate([of_topics(4, 2000)], FarFactor())
    assert (mixer.log_far != before).all()
    handover.cancel_()
    handover = segue.replace_(model, segue.Plan(sites="model.layers.0.self_attn", student=LinearAttention()), total_steps=1)
    with pytest.raises(StudentError) as error:
        handover.calibrate([of_topics(4, 2000)], FarFactor())
    assert str(error.value) == (
        "FarFactor() cannot start the student at site 'model.layers.0.self_attn'.\n"
        "  LinearAttention has no far part with a factor.\n"
        "  Hint: use it with WindowedLinear; LeastSquares() fits other students. Nothing was changed."
    )
