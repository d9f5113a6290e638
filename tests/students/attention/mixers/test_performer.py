"""Performer: its settings, its formula, its random directions, and how near it comes to softmax."""

import copy
import math

import pytest
import torch

from segue.errors import PlanError
from segue.students import Performer, Softmax
from segue.students.attention.mixers.performer import orthogonal_directions
from tests.students.attention.mixers.checks import assert_naive, attention_spec, inputs, mixer_of, padding
from tests.students.attention.mixers.formulas import prepared, scale_of, softmax_weights

SETTINGS = {"performer": Performer(features=16)}
STATE_DICT = {"performer": {"directions": (16, 7)}}


def naive(operator, spec, mixer, q, k, v, token_mask, causal):
    """Weigh by log mean over j of exp(w_j . q' - |q'|^2 / 2) exp(w_j . k' - |k'|^2 / 2), with q' k' = scale q k."""
    k, v, _, seen = prepared(q, k, v, token_mask, causal)
    scale, rows = scale_of(spec), []
    for head in range(q.shape[1]):
        of_q, of_k = (
            torch.einsum("btd,jd->btj", x, mixer.directions) * math.sqrt(scale) - scale * x.square().sum(-1, keepdim=True) / 2
            for x in (q[:, head], k[:, head])
        )
        pairs = of_q[:, :, None, :] + of_k[:, None, :, :]  # (batch, queries, keys, features)
        rows.append(torch.logsumexp(pairs, dim=-1) - math.log(len(mixer.directions)))
    return softmax_weights(torch.stack(rows, dim=1), seen) @ v


@pytest.mark.parametrize("causal", [False, True])
def test_keys_of_very_different_length_get_the_right_weights(causal):
    spec = attention_spec(heads=2, key_heads=1)
    q, k, v, g = inputs(1, spec, 300)
    lengths = torch.linspace(12, 0.1, 300)[:, None]  # the weights of the first keys are e**-200 of those of the last
    dtypes = [torch.float64, torch.float32]
    assert_naive(naive, SETTINGS["performer"], spec, q, k * lengths, v, None, causal, g, dtypes)


@pytest.mark.parametrize("grows", [False, True])
def test_tokens_one_by_one_give_what_all_of_them_give(grows):
    """Where keys become shorter the sums keep their scale, where they become longer each step changes it."""
    spec = attention_spec()
    mixer, (q, k, v, _), mask = mixer_of(SETTINGS["performer"], spec), inputs(4, spec, 40), padding(40)
    k = k * torch.linspace(*(0.1, 12) if grows else (12, 0.1), 40)[:, None]
    for token_mask in (None, mask):
        right = mixer.double()(q.double(), k.double(), v.double(), token_mask, causal=True).float()
        mixer.float()
        state = mixer.update_state(*(x[:, :, :5] for x in (k, v)), None if token_mask is None else token_mask[:, :5], None)
        for step in range(5, 40):
            one = slice(step, step + 1)
            of_token = None if token_mask is None else token_mask[:, one]
            y, after = mixer.decode_step(q[:, :, one], k[:, :, one], v[:, :, one], of_token, state)
            chunk = mixer.mix_chunk(q[:, :, one], k[:, :, one], v[:, :, one], of_token, state)
            real = slice(None) if of_token is None else of_token[:, 0]
            torch.testing.assert_close(y[real], right[real][:, :, one], atol=2e-4, rtol=2e-4)
            torch.testing.assert_close(y[real], chunk[real], atol=1e-5, rtol=1e-5)
            state = after


def test_directions_are_orthogonal_in_groups():
    w = orthogonal_directions(17, 7, torch.Generator().manual_seed(0))
    assert w.shape == (17, 7)
    angles = torch.nn.functional.normalize(w, dim=-1) @ torch.nn.functional.normalize(w, dim=-1).T
    for group in (slice(0, 7), slice(7, 14), slice(14, 17)):
        torch.testing.assert_close(angles[group, group], torch.eye(angles[group, group].shape[0]), atol=1e-5, rtol=0)
    assert angles[:7, 7:14].abs().max() > 0.1


def test_directions_are_as_long_as_gaussian_vectors_and_point_everywhere():
    w = orthogonal_directions(7000, 7, torch.Generator().manual_seed(0))
    squares = w.square().sum(-1)  # chi-square with 7 degrees of freedom: mean 7, variance 14
    assert squares.mean().item() == pytest.approx(7, rel=0.03)
    assert squares.var().item() == pytest.approx(14, rel=0.1)
    assert w.mean(0).abs().max() < 0.05
    torch.testing.assert_close(w.T @ w / 7000, torch.eye(7), atol=0.05, rtol=0)


def test_it_approaches_softmax_as_features_grow():
    spec = attention_spec(heads=2, key_heads=1)
    q, k, v, _ = inputs(1, spec, 20)
    q, k = (q - 1) / 2, (k - 1) / 2
    right = Softmax().mixer(spec)(q, k, v)

    def error(features: int) -> float:
        mixer, found = Performer(features=features).mixer(spec), []
        for seed in range(12):
            mixer.redraw_(seed)
            found.append((mixer(q, k, v) - right).norm() / right.norm())
        return torch.stack(found).mean().item()

    few, more, many = (error(features) for features in (14, 224, 3584))  # 16 times as many: in the long run 4 times as near
    assert few > 2 * more > 6 * many
    assert many < 0.03


def test_it_redraws_the_same_directions_from_the_same_seed():
    torch.manual_seed(0)
    mixer = Performer(features=20).mixer(attention_spec())
    drawn = [mixer.directions.clone()]
    state = torch.get_rng_state()
    for seed in (1, 2, 1):
        mixer.redraw_(seed)
        drawn.append(mixer.directions.clone())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[1], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    torch.manual_seed(0)
    mixer.reset_parameters()
    assert torch.equal(mixer.directions, drawn[0])
    half = copy.deepcopy(mixer).bfloat16()
    half.redraw_(1)
    assert torch.equal(half.directions, drawn[1].bfloat16())


def test_a_count_must_be_positive():
    with pytest.raises(PlanError, match=r"^Performer\(features=...\) must be a positive integer, got 0"):
        Performer(features=0)
