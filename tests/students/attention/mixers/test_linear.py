"""Linear attention: its settings, its formula, and its feature maps."""

import math

import pytest
import torch
from torch import Tensor, nn

from segue.errors import StudentError
from segue.students import LinearAttention
from segue.students.attention.mixers.linear import Hedgehog, elu_plus_one, feature_map, map_both
from tests.students.attention.mixers.checks import attention_spec, inputs, mixer_of, run
from tests.students.attention.mixers.formulas import feature_products, normalised, prepared, zero


def squared(x: Tensor) -> Tensor:
    return x.square() + 0.1


SETTINGS = {
    "elu": LinearAttention(),
    "relu": LinearAttention(feature_map="relu"),
    "hedgehog": LinearAttention(feature_map="hedgehog"),
    "own map": LinearAttention(feature_map=squared),
}
IN_MODELS = {f"LinearAttention {kind}": LinearAttention(feature_map=kind) for kind in ("elu", "relu", "hedgehog")}
STATE_DICT = {"hedgehog": {"of_queries.weight": (6, 7, 7), "of_keys.weight": (2, 7, 7)}}


def naive(operator, spec, mixer, q, k, v, token_mask, causal):
    k, v, _, seen = prepared(q, k, v, token_mask, causal)
    return normalised(feature_products(operator.feature_map, mixer, q, k).where(seen, zero())) @ v


def test_a_query_without_any_weight_gets_zeros():
    spec = attention_spec(heads=1, key_heads=1)
    q, k, v, g = inputs(1, spec, 9)
    mixer = mixer_of(LinearAttention(feature_map="relu"), spec)
    for causal in (False, True):
        found = run(mixer, mixer, q, -k.abs(), v, None, causal, g)
        assert found["output"].count_nonzero() == 0
        assert all(x.isfinite().all() for x in found.values())


X = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_elu_plus_one_is_the_exponential_below_zero_and_a_line_above():
    x = torch.tensor([-30.0, -2.0, -0.5, 0.0, 0.5, 2.0], dtype=torch.float64)
    assert elu_plus_one(x).tolist() == pytest.approx([math.exp(-30), math.exp(-2), math.exp(-0.5), 1.0, 1.5, 3.0])
    assert torch.equal(feature_map("elu", 3, 4)(X), elu_plus_one(X))


def test_relu_cuts_below_zero():
    assert torch.equal(feature_map("relu", 3, 4)(X), X * (X > 0))


def test_a_function_is_used_as_it_is():
    assert torch.equal(feature_map(torch.exp, 3, 4)(X), X.exp())
    assert feature_map(lambda x: x.square(), 3, 4)(X).shape == X.shape


@pytest.mark.parametrize("kind", ["elu", "relu", torch.exp])
def test_fixed_maps_hold_no_weights(kind):
    assert not feature_map(kind, 3, 4).state_dict()


def test_hedgehog_begins_with_the_identity_and_each_half_sums_to_one():
    y = Hedgehog(3, 4).double()(X)
    assert torch.equal(y, torch.cat([X.softmax(-1), (-X).softmax(-1)], dim=-1))
    assert y.unflatten(-1, (2, 4)).sum(-1).flatten().tolist() == pytest.approx([1.0] * 60)


def test_hedgehog_learns_one_matrix_per_head():
    map_ = feature_map("hedgehog", 3, 4).double()
    assert isinstance(map_, Hedgehog)
    assert map_.weight.shape == (3, 4, 4)
    before = map_(X)
    with torch.no_grad():
        map_.weight[1] = torch.arange(16.0).view(4, 4) / 10
    after = map_(X)
    projected = torch.einsum("btd,de->bte", X[:, 1], map_.weight[1])
    torch.testing.assert_close(after[:, 1, :, :4], projected.softmax(-1))
    torch.testing.assert_close(after[:, 1, :, 4:], (-projected).softmax(-1))
    assert torch.equal(after[:, [0, 2]], before[:, [0, 2]])
    map_.reset_parameters()
    assert torch.equal(map_(X), before)


def test_hedgehog_maps_one_token_of_several_sequences_as_it_maps_all_tokens():
    of_queries, of_keys = Hedgehog(3, 4).double(), Hedgehog(3, 4).double()
    with torch.no_grad():
        for map_ in (of_queries, of_keys):
            map_.weight.copy_(torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(len(map_.weight))))
        of_keys.weight.neg_()
    for batch in (X, X[:1]):
        for token in range(5):
            one = batch[:, :, token : token + 1]
            q, k = map_both(of_queries, of_keys, one, one)
            torch.testing.assert_close(q, of_queries(batch)[:, :, token : token + 1])
            torch.testing.assert_close(k, of_keys(batch)[:, :, token : token + 1])


def test_hedgehog_computes_in_the_precision_of_its_input():
    map_ = Hedgehog(3, 4).bfloat16()
    assert map_.weight.dtype == torch.bfloat16
    assert map_(X.float()).dtype == torch.float32
    torch.testing.assert_close(map_(X.float()), Hedgehog(3, 4)(X.float()))


@pytest.mark.parametrize("kind", ["Elu", "softmax", None, nn.ReLU, nn.ReLU()])
def test_other_kinds_are_refused(kind):
    with pytest.raises(StudentError) as error:
        feature_map(kind, 3, 4)
    assert str(error.value) == (
        f"feature_map={kind!r} is not a feature map.\n"
        "  The choices are 'elu', 'relu', 'hedgehog', or a function from a tensor to non-negative features.\n"
        "  Hint: wrap a module or a class in a function."
    )
