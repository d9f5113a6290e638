"""Texts of stories15M: what the model itself writes, since its training data cannot be had.

Command:  python experiments/stories15m/sample.py --model stories15m --out text.safetensors --text text.txt
Runtime:  5 minutes of one core for 896 sequences of 256 tokens.
Expected: a perplexity of the model on its own texts of 3.1.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from segue.data.files import quiet_transformers

AT_ONCE = 64  # sequences


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder that model.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="also write them as text, for `segue convert --data`")
    parser.add_argument("--sequences", type=int, default=14 * AT_ONCE)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = quiet_transformers(options.model).AutoModelForCausalLM.from_pretrained(options.model).eval()
    torch.manual_seed(options.seed)
    new = model.config.max_position_embeddings - 1
    parts, loss = [], 0.0
    for begin in range(0, options.sequences, AT_ONCE):
        first = torch.full((min(AT_ONCE, options.sequences - begin), 1), model.config.bos_token_id)
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": new, "min_new_tokens": new}
        ids = model.generate(first, attention_mask=torch.ones_like(first), **sampling)
        parts.append(ids.int())
        loss += model(ids, labels=ids).loss.item() * len(ids)
        print(f"{begin + len(ids)} sequences, perplexity {torch.tensor(loss / (begin + len(ids))).exp():.3f}", flush=True)
    save_file({"input_ids": torch.cat(parts)}, options.out)
    if options.text is not None:
        tokenizer = quiet_transformers(options.model).AutoTokenizer.from_pretrained(options.model)
        options.text.write_text("\n".join(tokenizer.batch_decode(torch.cat(parts), skip_special_tokens=True)), encoding="utf-8")


if __name__ == "__main__":
    main()
