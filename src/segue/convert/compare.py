"""Two models compared on the same examples: losses, choices, divergence, embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from segue.convert import speed
from segue.convert.pretrained import Base
from segue.convert.tasks import IGNORED, Task, embedded, token_scores
from segue.reporting.statistics import (
    Interval,
    bounded_interval,
    exponential,
    mean_interval,
    positive_interval,
    proportion_interval,
    transform,
)
from segue.similarity import divergence
from segue.training.progress import Progress

STEPS = 24  # timed tokens, or passes, of each model
LENGTHS = (32, 64, 128, 256, 512)  # tokens of a text for models that only read
BATCHES = (1, 2, 4, 8)  # images read at once
LOGITS_AT_ONCE = 2**25  # numbers held of each model
CONFIDENCE = (0.0, 0.5, 0.7, 0.9, 0.99, 1.0)  # edges of bins of the original's probability for its choice
GROUPS, GROUP_SIZE = 8, 4  # of texts by length: at most so many groups, of at least so many texts

SIDES = ("original", "converted")
Models = Mapping[str, Any]  # by side
Batches = Sequence[Mapping[str, Tensor]]


@torch.no_grad()
def compare_others(models: Models, base: Base, task: Task, batches: Batches, sizes: Sequence[int] | None) -> dict[str, Any]:
    """Compare models that do not generate, on batches of examples."""
    wanted = sizes or (BATCHES if base.reads_images else LENGTHS)
    longest = max(wanted) if base.reads_images else base.positions or max(wanted)
    fitting = [size for size in wanted if size <= longest] or [longest]
    make = None
    if base.reads_images:
        image = batches[0]["pixel_values"][:1]
        make = lambda _, count: {"pixel_values": image.repeat(count, 1, 1, 1)}  # noqa: E731
    rows: list[dict[str, Any]] = []
    found = embeddings(models, batches) if base.kind == "encoder" else choices(models, task, batches)
    show = Progress("speed", len(fitting))
    for done, size in enumerate(fitting, start=1):
        rows += speed.reading(models, [size], steps=STEPS, make=make)
        show(done, str(size))
    what = "images" if base.reads_images else "pieces of text" if base.kind == "masked" else "texts"
    return {
        "examples": {"count": sum(len(next(iter(batch.values()))) for batch in batches), "what": what},
        **found,
        "speed": rows,
        "contexts_omitted": sorted(set(wanted) - set(fitting)),
    }


def token_by_token(models: Models, ids: Tensor, name: str | None = "reading held-out text") -> dict[str, Tensor]:
    """Run both models on the same texts; return numbers for every predicted token, (texts, tokens - 1).

    The loss of each model and whether its first choice is correct, whether both have the same first choice, and
    KL(original || converted) in nats.
    """
    found: dict[str, list[Tensor]] = {}
    show, done = Progress(name, len(ids)), 0
    size = at_once(models["original"], ids.shape[1])
    for begin in range(0, len(ids), size):
        part = ids[begin : begin + size]
        original, converted = (models[which](input_ids=part, use_cache=False).logits[:, :-1].float() for which in SIDES)
        of_original, of_converted = token_scores(original, part[:, 1:]), token_scores(converted, part[:, 1:], original)
        _append(found, {f"{key}_original": x for key, x in of_original.items()})
        _append(found, {f"{key}_converted": of_converted.pop(key) for key in of_original} | of_converted)
        done += len(part)
        show(done)
    return {name: torch.cat(parts) for name, parts in found.items()}


def at_once(model: Any, tokens: int) -> int:
    """Return how many texts are read at once, so that their logits fit into memory."""
    return max(1, LOGITS_AT_ONCE // (tokens * int(model.config.vocab_size)))


def position_bins(last: int) -> list[tuple[int, int]]:
    """Divide the positions 1 to `last` into bins, two for every doubling: (first, last) of each.

    >>> position_bins(13)
    [(1, 1), (2, 2), (3, 3), (4, 5), (6, 7), (8, 11), (12, 13)]
    """
    edges = [1, 2, 3]
    while edges[-1] <= last:
        edges += [edges[-2] * 2, edges[-1] * 2]
    edges = [edge for edge in edges if edge <= last]
    return [(a, b - 1) for a, b in pairwise([*edges, last + 1])]


def choices(models: Models, task: Task, batches: Batches) -> dict[str, Any]:
    """Compare models that choose among tokens or classes."""
    losses: dict[str, list[Tensor]] = {}
    found: dict[str, list[Tensor]] = {}
    show = Progress("reading held-out examples", len(batches))
    for index, batch in enumerate(batches, start=1):
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        outputs = {name: model(**inputs) for name, model in models.items()}
        for name, output in outputs.items():
            _append(losses, {name: task.scores(lambda output=output, **_: output, batch)["loss"]})  # type: ignore[arg-type]
        counted = batch["labels"] != IGNORED
        original, converted = (output.logits[counted].float() for output in outputs.values())
        labels = batch["labels"][counted]
        same = original.argmax(-1) == converted.argmax(-1)
        _append(found, {"same": same, "kl": divergence(original, converted)})
        _append(found, {"correct_original": original.argmax(-1) == labels, "correct_converted": converted.argmax(-1) == labels})
        _append(found, {"confidence": original.softmax(-1).amax(-1)})
        show(index)
    return _of_choices(
        {name: torch.cat(parts) for name, parts in losses.items()}, {name: torch.cat(parts) for name, parts in found.items()}
    )


def embeddings(models: Models, batches: Batches) -> dict[str, Any]:
    """Compare models that map an example to a vector: the mean of its last hidden states."""
    found: dict[str, list[Tensor]] = {}
    show = Progress("reading held-out examples", len(batches))
    for index, batch in enumerate(batches, start=1):
        _append(found, {name: F.normalize(embedded(model, batch), dim=-1) for name, model in models.items()})
        if (mask := batch.get("attention_mask")) is not None:
            _append(found, {"lengths": mask.sum(1)})
        show(index)
    original, converted = (torch.cat(found[name]) for name in models)
    cosines = (original * converted).sum(1)
    lengths = torch.cat(found["lengths"]) if "lengths" in found else None
    return {
        "cosine": bounded_interval(cosines, -1.0),
        "cosines": cosines.tolist(),
        "lengths": None if lengths is None else lengths.tolist(),
        "by_length": [] if lengths is None else _by_length(cosines, lengths),
        "cosine_between_examples": (original @ original.T)[~torch.eye(len(original), dtype=torch.bool)].mean().item(),
        "same_neighbour": proportion_interval(neighbours(original) == neighbours(converted)) if len(cosines) > 2 else None,
    }


def neighbours(vectors: Tensor) -> Tensor:
    """Return the index of every vector's nearest neighbour."""
    return (vectors @ vectors.T).fill_diagonal_(-torch.inf).argmax(1)


def _append(found: dict[str, list[Tensor]], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        found.setdefault(name, []).append(value.cpu())


def perplexity(losses: Tensor) -> Interval:
    """Estimate a perplexity from one mean loss per text; it is at least 1."""
    return transform(exponential, positive_interval(losses))


def of_tokens(tokens: Mapping[str, Tensor]) -> dict[str, Any]:
    """Summarize tokens, one number per text: tokens of one text are not independent."""
    by_text = {name: x.mean(1) for name, x in tokens.items()}
    return {
        "perplexity": {side: perplexity(by_text[f"loss_{side}"]) for side in SIDES},
        "perplexity_ratio": ratio(by_text["loss_converted"], by_text["loss_original"]),
        "accuracy": _accuracy({side: by_text[f"accuracy_{side}"] for side in SIDES}),
        "same_first_choice": proportion_interval(by_text["same_first_choice"]),
        "kl": positive_interval(by_text["kl"]),
    }


def ratio(converted: Tensor, original: Tensor) -> Interval:
    """Estimate the ratio of two perplexities from the mean losses of the same texts, or prompts."""
    return transform(exponential, mean_interval(converted - original))


def _accuracy(correct: Mapping[str, Tensor]) -> dict[str, Interval]:
    difference = bounded_interval(correct["converted"] - correct["original"], -1.0)
    return {**{side: proportion_interval(correct[side]) for side in SIDES}, "difference": difference}


def _of_choices(losses: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, Any]:
    original, converted, confidence = found["correct_original"], found["correct_converted"], found["confidence"]
    return {
        "loss": {name: positive_interval(each) for name, each in losses.items()},
        "perplexity": {name: perplexity(each) for name, each in losses.items()},
        "perplexity_ratio": ratio(losses["converted"], losses["original"]),
        "accuracy": _accuracy({side: found[f"correct_{side}"].float() for side in SIDES}),
        "correct": {
            "both": int((original & converted).sum()),
            "original alone": int((original & ~converted).sum()),
            "converted alone": int((~original & converted).sum()),
            "neither": int((~original & ~converted).sum()),
        },
        "choices": len(original),
        "same_first_choice": proportion_interval(found["same"]),
        "kl": positive_interval(found["kl"]),
        "by_confidence": [
            {"from": low, "to": high, "same_first_choice": proportion_interval(found["same"][inside])}
            for low, high in pairwise(CONFIDENCE)
            if (inside := (confidence >= low) & ((confidence < high) | (high == 1.0))).any()
        ],
    }


def _by_length(cosines: Tensor, lengths: Tensor) -> list[dict[str, Any]]:
    """Divide the texts by length into groups of about the same size."""
    groups = lengths.argsort().chunk(max(1, min(GROUPS, len(lengths) // GROUP_SIZE)))
    ends = [(int(lengths[group].min()), int(lengths[group].max())) for group in groups]
    return [{"from": a, "to": b, "cosine": bounded_interval(cosines[i], -1.0)} for (a, b), i in zip(ends, groups, strict=True)]
