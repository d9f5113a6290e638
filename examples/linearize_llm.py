"""Make a language model's attention linear: train a small Llama, hand its attention over, and generate at constant memory."""

from __future__ import annotations

import argparse
import pathlib

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import segue

LENGTH = 128


def batches(steps: int, seed: int):
    """Yield pieces of text as bytes: a file of Python's own library."""
    data = torch.tensor(list(pathlib.Path(argparse.__file__).read_bytes()))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - LENGTH, (8,), generator=generator)
        yield torch.stack([data[start : start + LENGTH] for start in starts])


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids, use_cache=False).loss


@torch.no_grad()
def perplexity(model) -> float:
    model.eval()
    return torch.stack([loss_of(model, ids) for ids in batches(8, seed=1)]).mean().exp().item()


def train(model, parameters, steps: int, handover=None) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    model.train()
    for ids in batches(steps, seed=0):
        loss = loss_of(model, ids)
        if handover is not None:
            loss = loss + handover.aux_loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if handover is not None:
            handover.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4)
    model = LlamaForCausalLM(config)
    train(model, list(model.parameters()), 2 * steps)
    print(f"original: perplexity per byte {perplexity(model):.3f}")

    student = segue.students.WindowedLinear(window=16)
    plan = segue.methods.dcr_dfg(sites="model.layers.*.self_attn", student=student)
    handover = segue.replace_(model, plan, total_steps=steps)
    train(model, list(handover.parameters()), steps, handover)
    handover.finalize_()
    print(f"linear:   perplexity per byte {perplexity(model):.3f}")

    prompt = torch.tensor([list(b"import ")])
    settings = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    fast, slow = (model.generate(prompt, use_cache=cached, **settings) for cached in (True, False))
    print(f"{bytes(fast[0].tolist())!r}\nthe same tokens without a cache: {torch.equal(fast, slow)}")


if __name__ == "__main__":
    main()
