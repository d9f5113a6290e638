"""How gated students start: copied, by the closed form, by a local fit, or by both; all layers of a small language model.

Command: python -m experiments.stories15m.closed_form --model FOLDER --text FILE; about four minutes of one core.
Expected: docs/lab-log.md, "gated students by the closed form".

FOLDER is a Hugging Face folder of stories15M (Llama, 6 layers); FILE has text that was sampled from it.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import segue
from segue.students import ClosedForm, GatedDeltaNet, GatedLinear, LinearAttention

SITES = "model.layers.*.self_attn"
TOKENS = 256
CALIBRATION = 8  # sequences, 2,048 tokens
STUDENTS = {
    "GatedLinear": GatedLinear(),
    "GatedDeltaNet": GatedDeltaNet(),
    "DeltaNet": GatedDeltaNet(decay=False),
    "LinearAttention": LinearAttention(feature_map="hedgehog"),
}
ARMS = {"copied": (False, False), "closed form": (True, False), "local": (False, True), "both": (True, True)}


def sequences(tokenizer: Any, text: str) -> Tensor:
    """Cut a text into sequences of `TOKENS` tokens, each of which begins as a story does."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    body = ids[: len(ids) // (TOKENS - 1) * (TOKENS - 1)].view(-1, TOKENS - 1)
    return torch.cat([torch.full((len(body), 1), tokenizer.bos_token_id), body], dim=1)


def batches(data: Tensor, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield batches forever, every sequence as often as the others."""
    while True:
        yield from data[torch.randperm(len(data), generator=generator)].split(size)


@torch.no_grad()
def compare(student: nn.Module, original: nn.Module, data: Tensor) -> tuple[float, float]:
    """Return KL(original || student) per token, and the share of equal first choices."""
    divergence = same = 0.0
    for batch in data.split(4):
        theirs, ours = (model(batch).logits.log_softmax(-1) for model in (original, student))
        divergence += float((theirs.exp() * (theirs - ours)).sum(-1).mean()) * len(batch)
        same += float((theirs.argmax(-1) == ours.argmax(-1)).float().mean()) * len(batch)
    return divergence / len(data), same / len(data)


def fit_locally(handover: segue.Handover, data: Tensor, updates: int, lr: segue.phases.Rates) -> None:
    """Update all students at once, each from 256 tokens of its teacher's stream."""
    optimizer = torch.optim.AdamW(handover.parameter_groups(), weight_decay=0.0)
    schedule = segue.phases.Phase(name="local fit", local=True, lr=lr)
    source, done = batches(data, 4, torch.Generator().manual_seed(0)), 0
    while done < updates:
        with torch.no_grad(), handover.features() as features:
            handover.model(next(source))
        for loss in features.losses(split=4):
            segue.phases.set_rates(optimizer, schedule, (), done, updates)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1


def run(original: nn.Module, student: Any, arm: str, train: Tensor, held_out: Tensor, options: argparse.Namespace) -> str:
    """Replace all attention, start it as the arm says, and compare it with the original."""
    torch.manual_seed(0)
    closed_form, local = ARMS[arm]
    model = copy.deepcopy(original)
    plan = segue.Plan(sites=SITES, student=student, guidance=segue.losses.FeatureGuidance())
    handover, begin = segue.replace_(model, plan, total_steps=1000), time.process_time()
    if options.half_life is not None:
        for seam in handover.seams.values():
            gates = seam.student.mixer.gates
            each = torch.ones(gates.key_heads)
            gates.bias.data.copy_(gates.biases(options.half_life * each, 0.5 * each))
    if closed_form:
        handover.calibrate(train[:CALIBRATION].split(4), ClosedForm())
    if local:
        fit_locally(handover, train, options.updates, segue.phases.Rates(new=options.lr_new, copied=options.lr_copied))
    seconds = time.process_time() - begin
    kl, same = compare(handover.finalize_(force=True).eval(), original, held_out)
    return f"{kl:.3f} | {same:.3f} | {seconds:.0f} s"


def main() -> None:
    """Print one line for each student and arm."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Folder of the model.")
    parser.add_argument("--text", required=True, help="File with text sampled from it.")
    parser.add_argument("--students", nargs="+", default=["GatedLinear", "GatedDeltaNet"], choices=STUDENTS, help="Operators.")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS, help="Ways to start.")
    parser.add_argument("--updates", type=int, default=300, help="Number of local updates.")
    parser.add_argument("--lr-new", type=float, default=1e-2, help="Learning rate of gates and feature maps.")
    parser.add_argument("--lr-copied", type=float, default=1e-3, help="Learning rate of copied projections.")
    parser.add_argument("--sequences", type=int, help="Number of sequences, if not all of the text.")
    parser.add_argument("--held-out", type=int, default=16, help="Number of them to compare with.")
    parser.add_argument("--feature-map", help="Feature map, if not the operator's default.")
    parser.add_argument("--half-life", type=float, help="Half-life in tokens that all heads start with, if not the default.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    original = AutoModelForCausalLM.from_pretrained(options.model, use_cache=False).eval()
    with open(options.text, encoding="utf-8") as file:
        data = sequences(AutoTokenizer.from_pretrained(options.model), file.read())[: options.sequences]
    train, held_out = data[: -options.held_out], data[-options.held_out :]
    print(f"{len(train)} sequences of {TOKENS} tokens to learn from, {len(held_out)} held out")
    for name in options.students:
        student = replace(STUDENTS[name], feature_map=options.feature_map) if options.feature_map else STUDENTS[name]
        for arm in options.arms:
            print(f"| {name} | {arm} | {run(original, student, arm, train, held_out, options)} |", flush=True)


if __name__ == "__main__":
    main()
