"""Language models compared: on held-out text, in generation, in recall, without each branch, in speed and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from segue.convert import branches, compare, generation, recall, speed
from segue.convert.compare import STEPS, Models
from segue.convert.pretrained import Base
from segue.errors import ConfigError
from segue.training.progress import Progress

CONTEXTS = (256, 512, 1024, 2048, 4096)  # tokens before the generated ones


@torch.no_grad()
def compare_causal(
    models: Models, base: Base, ids: Tensor, contexts: Sequence[int] | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Compare language models that generate, on pieces of text, (pieces, tokens)."""
    fitting = fitting_contexts(contexts, base.positions)
    tokens = compare.token_by_token(models, ids)
    bins = compare.position_bins(tokens["kl"].shape[1])
    by_bin = [{name: x[:, first - 1 : last] for name, x in tokens.items()} for first, last in bins]
    probes = recall.probes(base.processor, ids, base.positions)
    return {
        "examples": {"count": len(ids), "what": f"pieces of {ids.shape[1]} tokens"},
        **compare.of_tokens(tokens),
        "positions": [{"from": a, "to": b, **compare.of_tokens(part)} for (a, b), part in zip(bins, by_bin, strict=True)],
        "greedy": generation.compare(models, ids, base.processor, say),
        "recall": recall.compare(models, probes),
        "branches": branches.compare(models, ids, probes),
        "speed": _speed(models, fitting),
        "contexts_omitted": sorted(set(contexts or CONTEXTS) - set(fitting)),
    }


def fitting_contexts(contexts: Sequence[int] | None, positions: int | None) -> list[int]:
    """Return the contexts that the original has positions for."""
    wanted = contexts or CONTEXTS
    room = max(wanted) if positions is None else positions - STEPS - 2
    fitting = [context for context in wanted if context <= room]
    if not fitting and contexts:
        fault = f"contexts must be at most {room} tokens, got {', '.join(map(str, wanted))}."
        found = f"The original has {positions} positions, {STEPS + 2} of which are for new tokens."
        raise ConfigError(fault, found, "give shorter --contexts.")
    return fitting or [max(1, room // 2), max(1, room)]


def _speed(models: Models, contexts: Sequence[int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    show = Progress("speed and memory", len(contexts))
    for done, context in enumerate(contexts, start=1):
        timed = speed.decoding(models, [context], steps=STEPS)
        rows += [{**row, "peak_bytes": speed.peak_bytes(models[row["model"]], context)} for row in timed]
        show(done, f"{context} tokens")
    return rows
