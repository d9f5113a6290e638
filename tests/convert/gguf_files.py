"""Write a Llama as a GGUF file, as llama.cpp's converter lays it out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from torch import Tensor

WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_A_LAYER = {
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Q8 = gguf.GGMLQuantizationType.Q8_0


def write(path: Path, model: Any, tokenizer: Any = None, *, quantised: bool = False) -> Path:
    """Write the weights, quantised to eight bits if asked, and the tokenizer if there is one."""
    config, file = model.config, gguf.GGUFWriter(path, "llama")
    file.add_name("small")
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_rope_freq_base(10000.0)
    file.add_vocab_size(config.vocab_size)
    if tokenizer is not None:
        _add_tokenizer(file, json.loads(tokenizer.backend_tokenizer.to_str())["model"])
    for name, weight in model.state_dict().items():
        numbers = _turned(name, weight, config).numpy()
        if quantised and weight.dim() == 2:
            file.add_tensor(_named(name), gguf.quants.quantize(numbers, Q8), raw_dtype=Q8)
        else:
            file.add_tensor(_named(name), numbers)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def _add_tokenizer(file: gguf.GGUFWriter, learned: dict[str, Any]) -> None:
    tokens = sorted(learned["vocab"], key=learned["vocab"].get)
    file.add_tokenizer_model("gpt2")
    file.add_token_list(tokens)
    file.add_token_types([gguf.TokenType.CONTROL if len(t) > 2 and t[0] == "<" else gguf.TokenType.NORMAL for t in tokens])
    file.add_token_merges([" ".join(pair) for pair in learned["merges"]])
    file.add_pad_token_id(0)
    file.add_eos_token_id(1)


def _turned(name: str, weight: Tensor, config: Any) -> Tensor:
    """Queries and keys are stored with the halves of their rotations interleaved."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return weight.reshape(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def _named(name: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    for ours, theirs in IN_A_LAYER.items():
        name = name.replace(ours, theirs)
    return name
