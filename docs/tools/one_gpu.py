"""Write docs/one-gpu.md: what a replacement takes on one GPU, counted by `segue.cost`, not measured.

python docs/tools/one_gpu.py            # writes the page's tables: a few minutes on one core
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import segue
from segue.lab.models import build, example
from segue.reporting.formatting import duration, flops, memory

PAGE = Path(__file__).parents[1] / "one-gpu.md"
STEPS = 1000
SUSTAINED = 50e12  # operations per second that the time is computed with
FLOAT32 = 4  # bytes
VITS = {"ViT-S/16": "timm:vit_small_patch16_224", "ViT-B/16": "timm:vit_base_patch16_224"}
LLAMAS = {  # the sizes of published models
    "Llama 135M": {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
                   "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True},
    "Llama 1B": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True},
    "Llama 8B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False},
}  # fmt: skip
METHODS = ("student_only", "dcr_dfg", "local_fit", "distillation")
HEADINGS = ("model", "method", "operations", "weights", "AdamW", "kept", "memory", "time")


def rows(label: str, name: str, sites: str, *, batch: int, tokens: int) -> list[list[str]]:
    """Count the methods on one model without weights."""
    model = build(name)
    inputs = example(model, batch, tokens)
    size = sum(parameter.numel() for parameter in model.parameters())
    found = []
    for method in METHODS:
        counted = segue.cost(model, getattr(segue.methods, method)(sites=sites), inputs, total_steps=STEPS)
        highest = max(counted.phases, key=lambda phase: phase.saved_bytes)
        held = max(phase.parameters for phase in counted.phases)
        trained = held - size  # the students; the teachers are part of the model
        weights, states, kept = FLOAT32 * held, 3 * FLOAT32 * trained, highest.saved_bytes
        found.append(
            [
                label,
                f"`{method}`",
                flops(counted.total.flops),
                *map(memory, (weights, states, kept, weights + states + kept)),
                duration(counted.total.flops * STEPS / SUSTAINED),
            ]
        )
    return found


def table(lines: list[list[str]]) -> str:
    """Write rows as Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in ([*HEADINGS], ["---"] * len(HEADINGS), *lines))


def main() -> None:
    """Replace the two tables of the page."""
    vits = [row for label, name in VITS.items() for row in rows(label, name, "blocks.*.attn", batch=32, tokens=1)]
    llamas: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for label, sizes in LLAMAS.items():
            config: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            llamas += rows(label, f"hf:{folder}", "model.layers.*.self_attn", batch=1, tokens=1024)
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in (("images", vits), ("text", llamas)):
        begin, end = f"<!-- counted: {name} -->\n\n", f"\n<!-- end: {name} -->"
        before, after = text[: text.index(begin)], text[text.index(end) :]
        text = before + begin + table(lines) + after
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
