"""Models that do not generate, compared: what they guess, name or return, and how fast they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.convert import speed
from segue.convert.base import Base
from segue.convert.compare_causal import STEPS, divergence
from segue.convert.tasks import IGNORED, Task, embedded
from segue.reporting import statistics
from segue.training.progress import Progress

LENGTHS = (32, 64, 128, 256, 512)  # tokens of a text
AT_ONCE = (1, 2, 4, 8)  # images
SURENESS = (0.0, 0.5, 0.7, 0.9, 0.99, 1.0)  # edges of bins of the original's probability for its choice
GROUPS, FEWEST = 8, 4  # of texts by their length, and texts in one

Batches = Sequence[Mapping[str, Tensor]]


def measure(
    models: Mapping[str, nn.Module], base: Base, task: Task, batches: Batches, sizes: Sequence[int] | None
) -> dict[str, Any]:
    """Compare the models on batches of examples."""
    with torch.no_grad():
        found = embeddings(models, batches) if base.kind == "encoder" else choices(models, task, batches)
        count = sum(len(next(iter(batch.values()))) for batch in batches)
        what = "images" if base.reads_images else "pieces of text" if base.kind == "masked" else "texts"
        fitting, make = _sizes(base, batches, sizes)
        asked = sizes or (AT_ONCE if base.reads_images else LENGTHS)
        return {
            "examples": {"count": count, "what": what},
            **found,
            "speed": _speed(models, fitting, make),
            "contexts_left_out": sorted(set(asked) - set(fitting)),
        }


def choices(models: Mapping[str, nn.Module], task: Task, batches: Batches) -> dict[str, Any]:
    """Compare models that choose among tokens or classes."""
    scores: dict[str, dict[str, list[Tensor]]] = {name: {} for name in models}
    chosen: dict[str, list[Tensor]] = {}
    tell = Progress("reading held-out examples", len(batches))
    for index, batch in enumerate(batches, start=1):
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        outputs = {name: model(**inputs) for name, model in models.items()}
        for name, output in outputs.items():
            for score, values in task.scores(lambda output=output, **_: output, batch).items():  # type: ignore[arg-type]
                scores[name].setdefault(score, []).append(values.cpu())
        asked = batch["labels"] != IGNORED
        original, converted = (output.logits[asked].float() for output in outputs.values())
        labels = batch["labels"][asked]
        now = {
            "same": original.argmax(-1) == converted.argmax(-1),
            "sure": original.softmax(-1).amax(-1),
            "kl": divergence(original, converted),
            "right_original": original.argmax(-1) == labels,
            "right_converted": converted.argmax(-1) == labels,
        }
        for name, value in now.items():
            chosen.setdefault(name, []).append(value.cpu())
        tell(index)
    return _of_choices(
        {name: {score: torch.cat(parts) for score, parts in each.items()} for name, each in scores.items()},
        {name: torch.cat(parts) for name, parts in chosen.items()},
    )


def _of_choices(scores: Mapping[str, Mapping[str, Tensor]], chosen: Mapping[str, Tensor]) -> dict[str, Any]:
    loss = {name: statistics.mean_interval(each["loss"]) for name, each in scores.items()}
    right, other = chosen["right_original"], chosen["right_converted"]
    return {
        "loss": loss,
        "perplexity": {name: statistics.transform(statistics.exponential, found) for name, found in loss.items()},
        "perplexity_ratio": statistics.transform(
            statistics.exponential, statistics.mean_interval(scores["converted"]["loss"] - scores["original"]["loss"])
        ),
        "hit": {name: statistics.proportion_interval(chosen[f"right_{name}"]) for name in scores},
        "right": {
            "both": int((right & other).sum()),
            "original alone": int((right & ~other).sum()),
            "converted alone": int((~right & other).sum()),
            "neither": int((~right & ~other).sum()),
        },
        "choices": len(right),
        "same_first_choice": statistics.proportion_interval(chosen["same"]),
        "kl": statistics.mean_interval(chosen["kl"]),
        "sureness": [
            {"from": low, "to": high, "same_first_choice": statistics.proportion_interval(chosen["same"][inside])}
            for low, high in pairwise(SURENESS)
            if (inside := (chosen["sure"] >= low) & ((chosen["sure"] < high) | (high == 1.0))).any()
        ],
    }


def embeddings(models: Mapping[str, nn.Module], batches: Batches) -> dict[str, Any]:
    """Compare models that turn an example into a vector: the mean of its last states."""
    found: dict[str, list[Tensor]] = {name: [] for name in models}
    lengths: list[Tensor] = []
    tell = Progress("reading held-out examples", len(batches))
    for index, batch in enumerate(batches, start=1):
        for name, model in models.items():
            found[name].append(F.normalize(embedded(model, batch), dim=-1).cpu())
        if (mask := batch.get("attention_mask")) is not None:
            lengths.append(mask.sum(1).cpu())
        tell(index)
    original, converted = (torch.cat(parts) for parts in found.values())
    cosines = (original * converted).sum(1)
    texts = torch.cat(lengths) if lengths else None
    return {
        "cosine": statistics.mean_interval(cosines),
        "cosines": cosines.tolist(),
        "lengths": None if texts is None else texts.tolist(),
        "by_length": [] if texts is None else _by_length(cosines, texts),
        "cosine_of_strangers": (original @ original.T)[~torch.eye(len(original), dtype=torch.bool)].mean().item(),
        "same_neighbour": statistics.proportion_interval(_neighbours(original) == _neighbours(converted))
        if len(cosines) > 2
        else None,
    }


def _neighbours(vectors: Tensor) -> Tensor:
    return (vectors @ vectors.T).fill_diagonal_(-torch.inf).argmax(1)


def _by_length(cosines: Tensor, lengths: Tensor) -> list[dict[str, Any]]:
    """Divide the texts by their length into groups of about the same size."""
    groups = lengths.argsort().chunk(max(1, min(GROUPS, len(lengths) // FEWEST)))
    return [
        {"from": int(lengths[group].min()), "to": int(lengths[group].max()), "cosine": statistics.mean_interval(cosines[group])}
        for group in groups
    ]


def _sizes(
    base: Base, batches: Batches, asked: Sequence[int] | None
) -> tuple[list[int], Callable[[Any, int], dict[str, Tensor]] | None]:
    if base.reads_images:
        image = batches[0]["pixel_values"][:1]
        return list(asked or AT_ONCE), lambda _, count: {"pixel_values": image.repeat(count, 1, 1, 1)}
    longest = base.positions or max(asked or LENGTHS)
    return [length for length in asked or LENGTHS if length <= longest] or [longest], None


def _speed(models: Mapping[str, Any], sizes: Sequence[int], make: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    tell = Progress("speed", len(sizes))
    for done, size in enumerate(sizes, start=1):
        rows += speed.reading(models, [size], steps=STEPS, make=make)
        tell(done, str(size))
    return rows
