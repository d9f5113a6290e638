"""Two causal language models compared: losses by position, choices, generated tokens, speed and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.convert import speed
from segue.convert.tasks import next_token_losses
from segue.errors import ConfigError
from segue.reporting import statistics
from segue.training.progress import Progress

CONTEXTS = (256, 512, 1024, 2048, 4096)
STEPS = 24  # tokens that are timed at each context
PROMPTS, TOGETHER = 32, 8  # that are continued, in all and at once
PROMPT, NEW = 256, 64  # tokens at most
NUMBERS_AT_ONCE = 2**25  # logits that are held of each model


def measure(models: Mapping[str, Any], ids: Tensor, contexts: Sequence[int] | None, positions: int | None) -> dict[str, Any]:
    """Compare the models on pieces of text, (pieces, tokens)."""
    places = _within(contexts, positions)
    with torch.no_grad():
        return {
            "examples": {"count": len(ids), "what": f"pieces of {ids.shape[1]} tokens"},
            **_summary(token_by_token(models, ids)),
            "greedy": greedy(models, ids),
            "speed": _speed(models, places),
            "contexts_left_out": sorted(set(contexts or CONTEXTS) - set(places)),
        }


def token_by_token(models: Mapping[str, nn.Module], ids: Tensor) -> dict[str, Tensor]:
    """Let both models read the same texts; return numbers for every predicted token, (texts, tokens - 1).

    The loss and the hit of each model, whether both have the same first choice, and KL(original || converted) in nats.
    """
    vocabulary = next(iter(models.values())).config.vocab_size  # type: ignore[union-attr]
    size = max(1, NUMBERS_AT_ONCE // (ids.shape[1] * int(vocabulary)))  # type: ignore[arg-type]
    found: dict[str, list[Tensor]] = {}
    tell = Progress("reading held-out text", len(ids))
    for begin in range(0, len(ids), size):
        part = ids[begin : begin + size]
        outputs = {name: model(input_ids=part, use_cache=False) for name, model in models.items()}
        now: dict[str, Tensor] = {}
        for name, output in outputs.items():
            now[f"loss_{name}"], now[f"hit_{name}"] = next_token_losses(lambda output=output, **_: output, part)  # type: ignore[arg-type]
        original, converted = (output.logits[:, :-1].float() for output in outputs.values())
        now["same"] = (original.argmax(-1) == converted.argmax(-1)).float()
        now["kl"] = divergence(original, converted)
        for name, value in now.items():
            found.setdefault(name, []).append(value.cpu())
        tell(begin + len(part))
    return {name: torch.cat(parts) for name, parts in found.items()}


def divergence(original: Tensor, converted: Tensor) -> Tensor:
    """Return KL(original || converted) of logits, in nats."""
    return F.kl_div(converted.log_softmax(-1), original.log_softmax(-1), reduction="none", log_target=True).sum(-1)


def greedy(models: Mapping[str, Any], ids: Tensor) -> dict[str, Any]:
    """Continue the beginnings of texts by the likeliest tokens: where the models part, and whether the cache changes any."""
    prompts = ids[:PROMPTS, : max(1, min(PROMPT, ids.shape[1] // 2))]
    new = max(1, min(NEW, ids.shape[1] // 2))
    tell = Progress("continuing prompts", 3 * len(prompts))
    told: dict[str, list[Tensor]] = {"original": [], "converted": [], "uncached": []}
    done = 0
    for begin in range(0, len(prompts), TOGETHER):
        part = prompts[begin : begin + TOGETHER]
        for name, parts in told.items():
            model = models["converted" if name == "uncached" else name]
            parts.append(continued(model, part, new, cached=name != "uncached").cpu())
            done += len(part)
            tell(done)
    original, converted, uncached = (torch.cat(parts) for parts in told.values())
    same = original == converted  # (prompts, new tokens)
    so_far = same.cumprod(1)
    identical = (converted == uncached).all(1)
    return {
        "prompts": len(prompts),
        "prompt_tokens": prompts.shape[1],
        "new_tokens": new,
        "equal": [statistics.proportion_interval(column) for column in same.T],
        "equal_so_far": [statistics.proportion_interval(column) for column in so_far.T],
        "equal_tokens": statistics.proportion_interval(same.float().mean(1)),
        "first_tokens_equal": statistics.mean_interval(so_far.sum(1)),
        "cache_changes_nothing": statistics.proportion_interval(identical),
    }


def continued(model: Any, prompts: Tensor, new: int, *, cached: bool) -> Tensor:
    """Generate the likeliest tokens, nothing else weighed in; an end mark does not end it."""
    plain = type(model.generation_config)  # the model's own settings may sample, or punish repetition
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


def _summary(tokens: Mapping[str, Tensor]) -> dict[str, Any]:
    bins = position_bins(tokens["kl"].shape[1])
    return {
        **_of(tokens),
        "positions": [{"from": a, "to": b, **_of({name: x[:, a - 1 : b] for name, x in tokens.items()})} for a, b in bins],
    }


def _of(tokens: Mapping[str, Tensor]) -> dict[str, Any]:
    """Summarize tokens, one number per text: tokens of one text are not independent."""
    by_text = {name: x.mean(1) for name, x in tokens.items()}
    losses = {name: by_text[f"loss_{name}"] for name in ("original", "converted")}
    return {
        "perplexity": {
            name: statistics.transform(statistics.exponential, statistics.mean_interval(x)) for name, x in losses.items()
        },
        "perplexity_ratio": statistics.transform(
            statistics.exponential, statistics.mean_interval(losses["converted"] - losses["original"])
        ),
        "hit": {name: statistics.proportion_interval(by_text[f"hit_{name}"]) for name in losses},
        "same_first_choice": statistics.proportion_interval(by_text["same"]),
        "kl": statistics.mean_interval(by_text["kl"]),
    }


def _speed(models: Mapping[str, Any], places: Sequence[int]) -> list[dict[str, Any]]:
    def rows() -> Iterator[dict[str, Any]]:
        tell = Progress("speed and memory", len(places))
        for done, context in enumerate(places, start=1):
            for row in speed.decoding(models, [context], steps=STEPS):
                yield {**row, "peak_bytes": speed.peak_bytes(models[row["model"]], context)}
            tell(done, f"{context} tokens")

    return list(rows())


def _within(contexts: Sequence[int] | None, positions: int | None) -> list[int]:
    """Leave out contexts that the original has no positions for."""
    asked = contexts or CONTEXTS
    room = max(asked) if positions is None else positions - STEPS - 2
    fitting = [context for context in asked if context <= room]
    if not fitting and contexts:
        raise ConfigError(
            f"contexts of {', '.join(map(str, asked))} tokens were asked for.",
            f"The original has {positions} positions, {STEPS + 2} of which are for new tokens.",
            "give shorter --contexts.",
        )
    return fitting or [max(1, room // 2), max(1, room)]
