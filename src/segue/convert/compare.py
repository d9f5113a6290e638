"""Two models compared on the same examples: losses, choices, continuations, embeddings, speed and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from segue.convert import speed
from segue.convert.pretrained import Base
from segue.convert.tasks import IGNORED, Task, embedded, next_token_losses
from segue.errors import ConfigError
from segue.reporting.statistics import Interval, exponential, mean_interval, proportion_interval, transform
from segue.training.progress import Progress

STEPS = 24  # timed tokens, or passes, of each model
CONTEXTS = (256, 512, 1024, 2048, 4096)  # tokens before the generated ones
LENGTHS = (32, 64, 128, 256, 512)  # tokens of a text for models that only read
BATCHES = (1, 2, 4, 8)  # images read at once
PROMPTS, PROMPTS_AT_ONCE = 32, 8
PROMPT_TOKENS, NEW_TOKENS = 256, 64  # at most
LOGITS_AT_ONCE = 2**25  # numbers held of each model
CONFIDENCE = (0.0, 0.5, 0.7, 0.9, 0.99, 1.0)  # edges of bins of the original's probability for its choice
GROUPS, GROUP_SIZE = 8, 4  # of texts by length: at most so many groups, of at least so many texts

Models = Mapping[str, Any]  # "original" and "converted"
Batches = Sequence[Mapping[str, Tensor]]


@torch.no_grad()
def compare_causal(models: Models, ids: Tensor, contexts: Sequence[int] | None, positions: int | None) -> dict[str, Any]:
    """Compare language models that generate, on pieces of text, (pieces, tokens)."""
    fitting = fitting_contexts(contexts, positions)
    tokens = token_by_token(models, ids)
    bins = position_bins(tokens["kl"].shape[1])
    by_bin = [{name: x[:, first - 1 : last] for name, x in tokens.items()} for first, last in bins]
    rows: list[dict[str, Any]] = []
    show = Progress("speed and memory", len(fitting))
    for done, context in enumerate(fitting, start=1):
        timed = speed.decoding(models, [context], steps=STEPS)
        rows += [{**row, "peak_bytes": speed.peak_bytes(models[row["model"]], context)} for row in timed]
        show(done, f"{context} tokens")
    return {
        "examples": {"count": len(ids), "what": f"pieces of {ids.shape[1]} tokens"},
        **_of_tokens(tokens),
        "positions": [{"from": a, "to": b, **_of_tokens(part)} for (a, b), part in zip(bins, by_bin, strict=True)],
        "greedy": greedy(models, ids),
        "speed": rows,
        "contexts_omitted": sorted(set(contexts or CONTEXTS) - set(fitting)),
    }


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


def token_by_token(models: Models, ids: Tensor) -> dict[str, Tensor]:
    """Run both models on the same texts; return numbers for every predicted token, (texts, tokens - 1).

    The loss of each model and whether its first choice is correct, whether both have the same first choice, and
    KL(original || converted) in nats.
    """
    vocabulary = next(iter(models.values())).config.vocab_size
    size = max(1, LOGITS_AT_ONCE // (ids.shape[1] * int(vocabulary)))
    found: dict[str, list[Tensor]] = {}
    show = Progress("reading held-out text", len(ids))
    for begin in range(0, len(ids), size):
        part = ids[begin : begin + size]
        outputs = {name: model(input_ids=part, use_cache=False) for name, model in models.items()}
        for name, output in outputs.items():
            losses, hits = next_token_losses(lambda output=output, **_: output, part)  # type: ignore[arg-type]
            _append(found, {f"loss_{name}": losses, f"correct_{name}": hits})
        original, converted = (output.logits[:, :-1].float() for output in outputs.values())
        _append(found, {"same": _same(original, converted).float(), "kl": divergence(original, converted)})
        show(begin + len(part))
    return {name: torch.cat(parts) for name, parts in found.items()}


def divergence(original: Tensor, converted: Tensor) -> Tensor:
    """Return KL(original || converted) of logits, in nats."""
    return F.kl_div(converted.log_softmax(-1), original.log_softmax(-1), reduction="none", log_target=True).sum(-1)


def greedy(models: Models, ids: Tensor) -> dict[str, Any]:
    """Continue the beginnings of texts greedily: where the models first differ, and whether the cache changes a token."""
    prompts = ids[:PROMPTS, : max(1, min(PROMPT_TOKENS, ids.shape[1] // 2))]
    new = max(1, min(NEW_TOKENS, ids.shape[1] // 2))
    show = Progress("continuing prompts", 3 * len(prompts))
    found: dict[str, list[Tensor]] = {"original": [], "converted": [], "uncached": []}
    done = 0
    for begin in range(0, len(prompts), PROMPTS_AT_ONCE):
        part = prompts[begin : begin + PROMPTS_AT_ONCE]
        for name, parts in found.items():
            model = models["converted" if name == "uncached" else name]
            parts.append(continued(model, part, new, cached=name != "uncached").cpu())
            done += len(part)
            show(done)
    original, converted, uncached = (torch.cat(parts) for parts in found.values())
    same = original == converted  # (prompts, new tokens)
    prefix = same.cumprod(1)
    return {
        "prompts": len(prompts),
        "prompt_tokens": prompts.shape[1],
        "new_tokens": new,
        "equal": [proportion_interval(column) for column in same.T],
        "equal_prefix": [proportion_interval(column) for column in prefix.T],
        "equal_tokens": proportion_interval(same.float().mean(1)),
        "equal_prefix_tokens": mean_interval(prefix.sum(1)),
        "cache_agreement": proportion_interval((converted == uncached).all(1)),
    }


def continued(model: Any, prompts: Tensor, new: int, *, cached: bool) -> Tensor:
    """Generate greedily, without the model's own generation settings and without stopping at an end token."""
    plain = type(model.generation_config)  # the model's own settings may sample, or penalise repetition
    model.generation_config = plain(max_new_tokens=new, do_sample=False, pad_token_id=0, use_cache=cached)
    ids: Tensor = model.generate(prompts, attention_mask=torch.ones_like(prompts))
    return ids[:, prompts.shape[1] :]


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
        _append(found, {"same": _same(original, converted), "kl": divergence(original, converted)})
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
        "cosine": mean_interval(cosines),
        "cosines": cosines.tolist(),
        "lengths": None if lengths is None else lengths.tolist(),
        "by_length": [] if lengths is None else _by_length(cosines, lengths),
        "cosine_between_examples": (original @ original.T)[~torch.eye(len(original), dtype=torch.bool)].mean().item(),
        "same_neighbour": proportion_interval(neighbours(original) == neighbours(converted)) if len(cosines) > 2 else None,
    }


def neighbours(vectors: Tensor) -> Tensor:
    """Return the index of every vector's nearest neighbour."""
    return (vectors @ vectors.T).fill_diagonal_(-torch.inf).argmax(1)


def _same(original: Tensor, converted: Tensor) -> Tensor:
    return original.argmax(-1) == converted.argmax(-1)


def _append(found: dict[str, list[Tensor]], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        found.setdefault(name, []).append(value.cpu())


def _perplexity(losses: Tensor) -> Interval:
    return transform(exponential, mean_interval(losses))


def _of_tokens(tokens: Mapping[str, Tensor]) -> dict[str, Any]:
    """Summarize tokens, one number per text: tokens of one text are not independent."""
    by_text = {name: x.mean(1) for name, x in tokens.items()}
    names = ("original", "converted")
    return {
        "perplexity": {name: _perplexity(by_text[f"loss_{name}"]) for name in names},
        "perplexity_ratio": _perplexity(by_text["loss_converted"] - by_text["loss_original"]),
        "accuracy": {name: proportion_interval(by_text[f"correct_{name}"]) for name in names},
        "same_first_choice": proportion_interval(by_text["same"]),
        "kl": mean_interval(by_text["kl"]),
    }


def _of_choices(losses: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, Any]:
    original, converted, confidence = found["correct_original"], found["correct_converted"], found["confidence"]
    return {
        "loss": {name: mean_interval(each) for name, each in losses.items()},
        "perplexity": {name: _perplexity(each) for name, each in losses.items()},
        "perplexity_ratio": _perplexity(losses["converted"] - losses["original"]),
        "accuracy": {name: proportion_interval(found[f"correct_{name}"]) for name in losses},
        "correct": {
            "both": int((original & converted).sum()),
            "original alone": int((original & ~converted).sum()),
            "converted alone": int((~original & converted).sum()),
            "neither": int((~original & ~converted).sum()),
        },
        "choices": len(original),
        "same_first_choice": proportion_interval(found["same"]),
        "kl": mean_interval(found["kl"]),
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
    return [{"from": a, "to": b, "cosine": mean_interval(cosines[i])} for (a, b), i in zip(ends, groups, strict=True)]
