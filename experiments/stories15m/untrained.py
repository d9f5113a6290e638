"""The untrained swap of stories15M: a window with sinks, with and without its linear part.

Command:  python experiments/stories15m/untrained.py --model stories15m --text text.safetensors
Runtime:  two minutes of one core.
Expected: in every line KL and perplexity with the linear part are not above those of the window alone.
"""

from __future__ import annotations

import argparse
import copy

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import segue
from segue.convert.tasks import token_scores
from segue.data.files import quiet_transformers

SITES = "model.layers.*.self_attn"
SEQUENCES = slice(-8, None)


@torch.no_grad()
def scores(model: nn.Module, original: nn.Module, ids: Tensor) -> dict[str, float]:
    """Return the mean scores per token, two sequences at a time."""
    found: dict[str, list[Tensor]] = {}
    for part in ids.split(2):
        logits, before = (each(part, use_cache=False).logits[:, :-1] for each in (model, original))
        for name, values in token_scores(logits, part[:, 1:], before).items():
            found.setdefault(name, []).append(values)
    return {name: torch.cat(parts).mean().item() for name, parts in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder that model.py wrote")
    parser.add_argument("--text", required=True, help="safetensors file that sample.py wrote")
    parser.add_argument("--windows", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--sinks", type=int, nargs="+", default=[0, 1, 4])
    options = parser.parse_args()
    original = quiet_transformers(options.model).AutoModelForCausalLM.from_pretrained(options.model).eval()
    ids = load_file(options.text)["input_ids"][SEQUENCES].long()
    for settings in ({"window": window, "sinks": sinks} for window in options.windows for sinks in options.sinks):
        print(settings, end="", flush=True)
        for student in (segue.students.SlidingWindow(**settings), segue.students.WindowedLinear(**settings)):
            model = copy.deepcopy(original)
            with segue.replace_(model, segue.Plan(sites=SITES, student=student), total_steps=1).as_student():
                found = scores(model, original, ids)
            perplexity, same = torch.tensor(found["loss"]).exp(), 100 * found["same_first_choice"]
            print(f"  {type(student).__name__}: KL {found['kl']:.4f}, same {same:.1f} %, perplexity {perplexity:.3f}", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
