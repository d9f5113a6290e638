"""What calibration does to a language model whose attention was replaced, before any training.

`python experiments/convert/calibration.py MODEL --window 32`, MODEL a folder or id of a causal language model: it samples text
from the model, replaces all attention by WindowedLinear, calibrates on a few sequences and judges by others. About a minute
for 15 M parameters on one core. Expected: held-out errors at the sites fall, or too few sequences are refused; perplexity and
KL to the original fall with students that are far from their teachers, and hardly change with those that are near.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import segue
from segue.errors import DataError
from segue.students import LeastSquares, WindowedLinear

TOKENS, HELD_OUT = 256, 8


@torch.no_grad()
def judged(model: Any, original: Tensor, ids: Tensor) -> str:
    """Return perplexity, KL to the original and the share of equal first choices."""
    found = model(ids).logits.log_softmax(-1)
    perplexity = F.nll_loss(found[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).exp().item()
    divergence = (original.exp() * (original - found)).sum(-1).mean().item()
    same = (original.argmax(-1) == found.argmax(-1)).float().mean().item()
    return f"{perplexity:.2f} | {divergence:.3f} | {same:.3f} |"


def swapped(model: Any, plan: segue.Plan, method: LeastSquares | None, batches: Any, original: Tensor, ids: Tensor) -> str:
    """Replace, calibrate, and return the mean of the held-out errors with what is judged."""
    handover, errors = segue.replace_(copy.deepcopy(model), plan, total_steps=1), ""
    if method is not None:
        try:
            fitted = handover.calibrate(batches, method).values()
        except DataError as error:
            return f"{str(error).splitlines()[0]} | | | |"
        before, after = (sum(part) / len(fitted) for part in zip(*((fit.before, fit.after) for fit in fitted), strict=True))
        errors = f"{before:.3f} -> {after:.3f}"
    with handover.as_student() as students:
        return f"{errors} | {judged(students, original, ids)}"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="Folder or id of a causal language model.")
    parser.add_argument("--sites", default="model.layers.*.self_attn", help="Pattern of the attention modules.")
    parser.add_argument("--window", type=int, default=32, help="Tokens in the softmax part.")
    parser.add_argument("--sequences", type=int, nargs="+", default=[2, 4, 8, 16], help="Numbers of sequences to calibrate on.")
    given = parser.parse_args()
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(given.model).eval()
    count = max(given.sequences) + HELD_OUT
    start = torch.full((count, 1), model.config.bos_token_id)
    ids = model.generate(start, do_sample=True, top_k=0, max_new_tokens=TOKENS - 1, min_new_tokens=TOKENS - 1)
    held_out, rest = ids[:HELD_OUT], ids[HELD_OUT:]
    with torch.no_grad():
        original = model(held_out).logits.log_softmax(-1)
    print("| calibrated on | relative error | perplexity | KL | same |\n|---|---|---|---|---|")
    print(f"| - (the original) | | {judged(model, original, held_out)}")
    plan = segue.Plan(sites=given.sites, student=WindowedLinear(window=given.window))
    print(f"| nothing | {swapped(model, plan, None, [], original, held_out)}")
    for count in given.sequences:
        for stream in ("student", "teacher"):
            said = swapped(model, plan, LeastSquares(stream=stream), rest[:count].split(4), original, held_out)
            print(f"| {count * TOKENS:,} tokens on the {stream}'s stream | {said}", flush=True)


if __name__ == "__main__":
    main()
