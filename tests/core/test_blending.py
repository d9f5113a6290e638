"""Blending: tensors at the ends and between, and what a call and an output hold."""

import pytest
import torch
from transformers import DynamicCache

from segue.core.blending import call_arguments, detached, first_floating, fork_caches, mix, padding_mask, tensors
from segue.errors import StudentError
from segue.sites import Site
from tests.helpers.tiny import same_bits

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_endpoints_are_bit_for_bit_whatever_the_other_side_holds(dtype, as_tensor):
    values = torch.tensor([-0.0, 0.0, 1e-8, -3.3, INF, NAN, 60000.0]).to(dtype)
    poison = torch.tensor([INF, NAN, -INF, 7.0, 1.0, -0.0, NAN]).to(dtype)
    for w, expected in ((0.0, values), (1.0, poison)):
        weight = torch.tensor(w) if as_tensor else w
        assert same_bits(mix(values, poison, weight), expected)
        assert same_bits(mix(values, poison.clone().requires_grad_(), weight), expected)


def test_the_blend_is_alpha_teacher_plus_rest_student():
    t, s = torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    for w in (0.1, 0.5, 0.93):
        torch.testing.assert_close(mix(t, s, w), (1 - w) * t + w * s, rtol=1e-14, atol=1e-14)


def test_half_precision_is_blended_in_float32():
    t, s = torch.randn(1000).bfloat16(), torch.randn(1000).bfloat16()
    expected = torch.lerp(t.float(), s.float(), 0.903).bfloat16()
    assert same_bits(mix(t, s, 0.903), expected)
    assert same_bits(mix(t, s, torch.tensor(0.903)), expected)


def test_what_is_not_floating_is_chosen_not_blended():
    t, s = torch.tensor([1, 2]), torch.tensor([3, 4])
    assert mix(t, s, 0.0).tolist() == [1, 2]
    assert mix(t, s, 0.5).tolist() == [3, 4]
    assert mix(t, s, torch.tensor(0.0)).tolist() == [1, 2]
    assert mix(t, s, torch.tensor(0.5)).tolist() == [3, 4]


def test_the_padding_mask_is_the_two_dimensional_attention_mask():
    mask = torch.ones(2, 3)
    assert padding_mask({"input_ids": mask, "attention_mask": mask}) is mask
    for batch in (mask, (mask, mask), {"input_ids": mask}, {"attention_mask": torch.ones(2, 1, 3, 3)}):
        assert padding_mask(batch) is None


def test_a_batch_is_read_as_the_model_is_called():
    x, y = torch.ones(1), torch.zeros(1)
    assert call_arguments(x) == ((x,), {})
    assert call_arguments([x, y]) == ((x, y), {})
    assert call_arguments({"x": x}) == ((), {"x": x})


def test_a_teachers_cache_follows_the_moves_of_the_students():
    cache = DynamicCache()
    cache.update(torch.arange(3.0).view(3, 1, 1, 1), torch.zeros(3, 1, 1, 1), 0)
    (teachers,), _ = fork_caches((cache,), {})
    assert teachers is not cache
    teachers.update(torch.full((3, 1, 1, 1), 9.0), torch.zeros(3, 1, 1, 1), 0)  # its own past
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert cache.layers[0].keys.flatten().tolist() == [2.0, 0.0, 1.0]
    assert teachers.layers[0].keys[:, 0, :, 0].tolist() == [[2.0, 9.0], [0.0, 9.0], [1.0, 9.0]]
    cache.batch_repeat_interleave(2)
    assert teachers.layers[0].keys.shape[0] == cache.layers[0].keys.shape[0] == 6
    assert fork_caches((cache,), {})[0][0] is teachers


def test_a_cache_of_ones_own_needs_no_moves():
    class Own:
        def update(self, keys, values, layer): ...
        def get_seq_length(self):
            return 0

    cache = Own()
    _, given = fork_caches((), {"past": cache})
    assert isinstance(given["past"], Own)
    assert not hasattr(cache, "reorder_cache")


def test_guidance_compares_the_first_floating_tensor_of_an_output():
    x = torch.ones(2)
    output = (None, {"ids": torch.tensor([1]), "hidden": x}, torch.zeros(2))
    assert first_floating(output, Site("here")) is x
    assert len(list(tensors(output))) == 3
    with pytest.raises(StudentError) as error:
        first_floating(torch.tensor([1]), Site("here"))
    assert str(error.value).splitlines()[:2] == [
        "the output at site 'here' cannot be compared.",
        "  Tensor holds no floating tensor.",
    ]


def test_a_detached_tree_keeps_its_shape_and_loses_its_graph():
    x = torch.ones(2, requires_grad=True) * 2
    tree = detached((x, [x], {"x": x, "text": "kept"}))
    assert not any(t.requires_grad for t in tensors(tree))
    assert tree[2]["text"] == "kept"
