"""The rotation of one token: bit for bit that of all tokens, and only where the model's own is the same."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama

from segue.students.attention.families import ByName
from segue.students.attention.families.rotations import is_by_halves, rotate_token
from segue.students.attention.spec import rotate
from tests.helpers import models


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_token_is_rotated_bit_for_bit_as_all_tokens_are(dtype, batch):
    for seed in range(20):
        q, k = drawn(batch, 6, 1, 64, seed=seed).to(dtype), drawn(batch, 2, 1, 64, seed=seed + 100).to(dtype)
        cos, sin = (drawn(batch, 1, 64, seed=seed + n).to(dtype) for n in (200, 300))
        for _ in range(2):  # made, and remembered
            found = rotate_token(q, k, cos, sin)
            assert torch.equal(found[0], rotate(q, cos, sin))
            assert torch.equal(found[1], rotate(k, cos, sin))


def test_angles_that_change_are_read_again():
    q, k, cos, sin = (drawn(1, n, 1, 8, seed=n) for n in (4, 2, 1, 3))
    cos, sin = cos[:, 0].clone(), sin[:, 0].clone()
    for change in (lambda: None, lambda: cos.mul_(2), lambda: sin.neg_()):
        change()
        assert torch.equal(rotate_token(q, k, cos, sin)[0], rotate(q, cos, sin))
    for turn in range(20):  # the memory of the last one is used again
        fresh = drawn(1, 1, 8, seed=turn)
        assert torch.equal(rotate_token(q, k, fresh, sin)[1], rotate(k, fresh, sin))
        del fresh
    with torch.inference_mode():  # where changes are not counted
        cos, sin = cos.clone(), sin.clone()
        for _ in range(2):
            assert torch.equal(rotate_token(q, k, cos, sin)[0], rotate(q, cos, sin))
            cos.mul_(2)


def in_float32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = modeling_llama.apply_rotary_pos_emb(q.float(), k.float(), cos.float(), sin.float())
    return q.to(cos.dtype), k.to(cos.dtype)


def test_only_a_rotation_by_halves_is_taken_for_one():
    assert is_by_halves(modeling_llama.apply_rotary_pos_emb)
    assert not is_by_halves(modeling_cohere.apply_rotary_pos_emb)  # of neighbouring features
    assert not is_by_halves(in_float32)
    assert not is_by_halves(lambda q, k, cos: (q, k))
    with torch.device("meta"):  # a default device, which the trial must not use
        assert is_by_halves(modeling_llama.apply_rotary_pos_emb)
    assert not is_by_halves(lambda q, k, cos, sin: (rotate(q, cos, sin), k))


@pytest.mark.parametrize(("family", "by_halves"), [("llama", True), ("cohere", False), ("glm", False), ("gpt_neox", False)])
def test_a_decoding_step_rotates_as_its_model_does(family, by_halves):
    """With the model's own cos and sin; GPT-NeoX rotates a part of each head, which is left to its own function."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 11}
    sizes |= {"num_key_value_heads": 4, "head_dim": 8} if family != "gpt_neox" else {}
    config = transformers.AutoConfig.for_model(family, **sizes, pad_token_id=0)
    model = models.build(lambda: transformers.AutoModel.from_config(config)).eval()
    attention = model.layers[0].attention if family == "gpt_neox" else model.layers[0].self_attn
    interface = ByName(attention, rotation="own on a part" if family == "gpt_neox" else "own")
    rotary = model.rotary_emb(torch.zeros(1, 1, 32), torch.tensor([[5]]))
    q, k = drawn(1, 4, 1, 8), drawn(1, 4, 1, 8, seed=1)
    expected = interface.rotate(q, k, rotary)  # with gradients: by the model's own function
    with torch.no_grad():
        found = interface.rotate(q, k, rotary)
    assert torch.equal(expected[0], found[0])
    assert torch.equal(expected[1], found[1])
    assert not torch.equal(found[0], q)
    assert interface.by_halves is by_halves
