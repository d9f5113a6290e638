"""Train a small Llama and its tokenizer on a text file: something real to convert where no hub can be reached.

python experiments/convert/tiny_llama.py --text shakespeare.txt --out runs/tiny_llama
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import segue
from segue.convert.tasks import NextToken
from segue.data.files import quiet_transformers
from segue.training.batches import Batches, InOrder

transformers = quiet_transformers("Llama")


def tokenizer(text: str, size: int) -> transformers.PreTrainedTokenizerFast:
    """Learn a byte-level BPE tokenizer."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    specials = ["<|end|>", "<|pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    learned.train_from_iterator([text], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=learned, eos_token="<|end|>", pad_token="<|pad|>", padding_side="left"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()

    text = options.text.read_text(encoding="utf-8")
    reader = tokenizer(text, options.vocabulary)
    ids = torch.tensor(reader(text, verbose=False)["input_ids"])
    blocks = ids[: len(ids) // options.tokens * options.tokens].reshape(-1, options.tokens)
    held = max(1, len(blocks) // 20)  # the end of the text, which `segue convert` holds out too
    train, validation = blocks[:-held], blocks[-held:]
    config = transformers.LlamaConfig(
        vocab_size=len(reader),
        hidden_size=options.width,
        intermediate_size=options.width * 8 // 3 // 32 * 32,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 32,
        num_key_value_heads=options.width // 64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=reader.eos_token_id,
        pad_token_id=reader.pad_token_id,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {train.numel():,} tokens to train on")
    task = NextToken()
    trained = segue.fit(
        model,
        None,
        Batches(len(train), options.batch, lambda chosen, _: {"input_ids": train[chosen]}, seed=0),
        task,
        recipe=segue.Recipe(steps=options.steps, lr=options.lr, warmup=0.05, weight_decay=0.1),
        validation=InOrder(held, options.batch, lambda chosen: {"input_ids": validation[chosen]}),
        evaluations=6,
        on_eval=lambda point: print(f"step {point['step']}: perplexity {task.of(point['scores']):.4g}"),
        progress="training",
    )
    model.eval().save_pretrained(options.out)
    reader.save_pretrained(options.out)
    print(f"{options.out}: perplexity {task.of(trained.history[-1]['scores']):.4g} on text it has not seen")


if __name__ == "__main__":
    main()
