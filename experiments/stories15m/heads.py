"""Heads of stories15M that stay softmax attention: those that choose_heads finds, against heads drawn at random.

Command:  python experiments/stories15m/heads.py --model stories15m --text text.safetensors
Runtime:  a minute of one core.
Expected: on other sequences the chosen heads bring more KL back than each random draw.
"""

from __future__ import annotations

import argparse
import copy
import random

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import segue
from segue.data.files import quiet_transformers
from segue.similarity import divergence

SITES = "model.layers.*.self_attn"
CHOSEN_ON, JUDGED_ON = slice(-8, -6), slice(-4, None)  # sequences


@torch.no_grad()
def damage(model: nn.Module, student: segue.students.MixedHeads, ids: Tensor) -> float:
    """Return the KL divergence, per token, of the model with untrained students from itself."""
    swapped = copy.deepcopy(model)
    handover = segue.replace_(swapped, segue.Plan(sites=SITES, student=student), total_steps=1)
    with handover.as_student():
        return divergence(model(ids).logits, swapped(ids).logits).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder that model.py wrote")
    parser.add_argument("--text", required=True, help="safetensors file that sample.py wrote")
    parser.add_argument("--keep", type=int, default=4)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--draws", type=int, default=3)
    options = parser.parse_args()
    model = quiet_transformers(options.model).AutoModelForCausalLM.from_pretrained(options.model).eval()
    ids = load_file(options.text)["input_ids"].long()
    mixture = segue.students.MixedHeads(operator=segue.students.WindowedLinear(window=options.window))
    batches = [{"input_ids": ids[CHOSEN_ON]}]
    chosen = segue.planning.choose_heads(model, SITES, mixture, batches, keep=options.keep)
    print(f"chosen on 2 sequences: KL {chosen.kl_without:.3f} -> {chosen.kl:.3f}, heads {chosen.student.keep}")
    places = [(site, head) for site, gains in chosen.gains.items() for head in range(len(gains))]
    arms = {"no heads": mixture, "chosen": chosen.student}
    for seed in range(options.draws):
        drawn = random.Random(seed).sample(places, options.keep)
        keep = {site: tuple(sorted(head for of, head in drawn if of == site)) for site in chosen.gains}
        arms[f"random, seed {seed}"] = segue.students.MixedHeads(operator=mixture.operator, keep=keep)
    for name, student in arms.items():
        print(f"{name}: KL {damage(model, student, ids[JUDGED_ON]):.3f} on {len(ids[JUDGED_ON])} other sequences")


if __name__ == "__main__":
    main()
