"""Branch ablation: what each part of the converted operators contributes, measured by leaving it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from segue.convert import compare as comparison
from segue.convert import recall
from segue.convert.compare import Models
from segue.convert.recall import Probe
from segue.reporting.statistics import positive_interval
from segue.training.progress import Progress

TEXTS = 32  # of the held-out ones
RECALL = ("text", "associative")  # at its farthest distance


def compare(models: Models, ids: Tensor, probes: Mapping[str, list[Probe]]) -> list[dict[str, Any]]:
    """Compare the converted model, complete and without each branch of its operators, with the original."""
    names = branches_of(models["converted"])
    rows = []
    show = Progress("branches", len(names) + 1)
    for done, name in enumerate((None, *names) if names else (), start=1):
        with without(models["converted"], name):
            tokens = comparison.of_tokens(comparison.token_by_token(models, ids[:TEXTS], None))
            asked = {each: recall.answered(models["converted"], probes[each][-1])["loss"] for each in RECALL}
        rows.append(
            {
                "without": name,
                "texts": len(ids[:TEXTS]),
                "perplexity": tokens["perplexity"]["converted"],
                "kl": tokens["kl"],
                "same_first_choice": tokens["same_first_choice"],
                "loss": {each: positive_interval(found.mean(1)) for each, found in asked.items()},
            }
        )
        show(done, name or "complete")
    return rows


def branches_of(model: nn.Module) -> list[str]:
    """Return the names of the branches of all operators in a model, each once."""
    return list(dict.fromkeys(name for module in model.modules() for name in getattr(module, "branches", ())))


@contextmanager
def without(model: nn.Module, name: str | None) -> Iterator[None]:
    """Leave a branch out of every operator that has it, and the operator complete again afterwards."""
    found: list[Any] = [module for module in model.modules() if name in getattr(module, "branches", ())]
    before = [module.ablated for module in found]
    try:
        for module in found:
            module.ablated = name
        yield
    finally:
        for module, earlier in zip(found, before, strict=True):
            module.ablated = earlier
