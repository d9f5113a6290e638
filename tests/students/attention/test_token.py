"""The short way of one token: taken where a module and its call have the common form, and never with another result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import DynamicCache

from segue.students.attention import module as attention
from segue.students.attention.families import ByName
from segue.students.attention.token import decode_token
from tests.students.attention.test_cache import converted, every_operator, original, text


def read(model: nn.Module, rows: int = 1) -> DynamicCache:
    """Let a model read a text, all but its last token at once: windows are full after 21 tokens."""
    cache = DynamicCache(config=model.config)
    model(text(rows=rows), past_key_values=cache)
    model(text(1, rows=rows), past_key_values=cache)
    return cache


@torch.no_grad()
def decoded(model: nn.Module, rows: int = 1, **call: Any) -> Tensor:
    cache, found = read(model, rows), []
    for seed in range(3):
        found.append(model(text(1, rows=rows, seed=seed), past_key_values=cache, **call).logits)
    return torch.stack(found)


@pytest.fixture
def ways(monkeypatch):
    """Note of each call without gradients whether it takes the short way."""
    taken: list[bool] = []

    def noted(*args: Any) -> Any:
        found = decode_token(*args)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(attention, "decode_token", noted)
    return taken


def is_short(ways: list[bool]) -> bool:
    """Return whether the last of the three layers took the short way."""
    return ways[-1]


@pytest.mark.parametrize("rows", [1, 3])
@every_operator
def test_the_short_way_returns_what_the_long_one_does(monkeypatch, ways, name, rows):
    model = converted(name)
    short = decoded(model, rows)
    assert ways[-9:] == [True] * 9  # three tokens in three layers
    monkeypatch.setattr(attention, "decode_token", lambda *_: None)
    torch.testing.assert_close(short, decoded(model, rows), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "cohere", "gpt2"])
def test_every_family_decodes_the_same_by_both_ways(monkeypatch, family):
    model = converted(family=family)
    short = decoded(model)
    monkeypatch.setattr(attention, "decode_token", lambda *_: None)
    torch.testing.assert_close(short, decoded(model), atol=1e-6, rtol=1e-5)


def test_norms_padding_and_gradients_take_the_long_way(ways):
    decoded(converted(family="qwen3"))  # which norms its queries and keys
    assert not any(ways)
    model = converted()
    mask = torch.ones(3, 23, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(text(22), attention_mask=mask[:, :22], past_key_values=cache)
        model(text(1), attention_mask=mask, past_key_values=cache)
        assert not any(ways)
        cache = read(model)
    ways.clear()
    model(text(1, rows=1), past_key_values=cache)
    assert not ways


@pytest.mark.parametrize("part", ["query", "key", "value", "output"])
def test_a_projection_that_is_changed_or_listened_to_is_called(ways, part):
    model = converted()
    plain, last = decoded(model), model.model.layers[-1].self_attn
    assert is_short(ways)
    projection = getattr(last, part)
    heard: list[Tensor] = []
    handle = projection.register_forward_hook(lambda _module, _args, output: heard.append(output))
    assert torch.equal(decoded(model), plain)
    assert len(heard) == 5
    assert not is_short(ways)
    handle.remove()
    projection.forward = lambda x: 2 * nn.Linear.forward(projection, x)  # as Accelerate replaces it to move weights
    twice = decoded(model)
    assert not is_short(ways)
    del projection.forward
    with torch.no_grad():
        projection.weight.mul_(2)
    torch.testing.assert_close(twice, decoded(model), atol=1e-5, rtol=1e-5)
    assert is_short(ways)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("name", ["hedgehog", "gated linear", "windowed"])
def test_a_parametrization_of_a_mixer_is_computed(name):
    model, doubled = converted(name), converted(name)
    for layer, other in zip(model.model.layers, doubled.model.layers, strict=True):
        parametrize.register_parametrization(layer.self_attn.mixer.of_queries, "weight", Twice())
        with torch.no_grad():
            other.self_attn.mixer.of_queries.weight.mul_(2)
    assert torch.equal(decoded(model), decoded(doubled))


def test_an_interface_that_reads_calls_in_its_own_way_has_no_short_way():
    class Mine(ByName):
        def unpack(self, *args: Any, **kwargs: Any) -> Any:
            return super().unpack(*args, **kwargs)

    class Named(ByName):
        name = "mine"

    module = original().model.layers[0].self_attn
    call = {"hidden_states": torch.zeros(1, 1, 32), "past_key_values": DynamicCache()}
    assert Mine(module).unpack_token(call) is None
    assert Named(module).unpack_token(call) is not None
    assert Named(module).unpack_token(call | {"attention_mask": torch.ones(1, 1)}) is None
    assert Named(module).unpack_token(call | {"output_attentions": True}) is None
