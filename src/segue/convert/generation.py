"""Generation compared: where two models first differ, how much each repeats itself, how likely the original finds its text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from segue.convert.compare import SIDES, Models, perplexity, ratio, token_by_token
from segue.reporting.formatting import duration
from segue.reporting.statistics import bounded_interval, positive_interval, proportion_interval, transform
from segue.training.progress import Progress

PROMPTS, PROMPTS_AT_ONCE = 32, 8
PROMPT_TOKENS, NEW_TOKENS = 256, 64  # at most
UNCACHED = 4  # prompts that are continued without a cache too: every token reads the complete text again
REPEATED = 4  # tokens of what counts as repeated
SAMPLES = 3  # prompts whose continuations are shown


def compare(models: Models, ids: Tensor, tokenizer: Any, say: Callable[[str], None]) -> dict[str, Any]:
    """Continue the beginnings of texts greedily with both models."""
    prompts = ids[:PROMPTS, : max(1, min(PROMPT_TOKENS, ids.shape[1] // 2))]
    new = max(1, min(NEW_TOKENS, ids.shape[1] // 2))
    texts = _continuations(models, prompts, new)
    begun = time.perf_counter()
    read = {side: token_by_token(models, torch.cat([prompts, texts[side]], dim=1), None) for side in SIDES}
    seconds = (time.perf_counter() - begun) / (4 * len(prompts))  # both models read the texts of both
    uncached = _uncached(models["converted"], prompts[:UNCACHED], new, seconds, say).cpu()
    texts = {side: text.cpu() for side, text in texts.items()}
    same = texts["original"] == texts["converted"]  # (prompts, new tokens)
    prefix = same.cumprod(1)
    losses = {side: read[side]["loss_original"][:, -new:].mean(1) for side in SIDES}
    repeated = {side: repetition(texts[side]) for side in SIDES}
    return {
        "prompts": len(prompts),
        "prompt_tokens": prompts.shape[1],
        "new_tokens": new,
        "equal": [proportion_interval(column) for column in same.T],
        "equal_prefix": [proportion_interval(column) for column in prefix.T],
        "equal_tokens": proportion_interval(same.float().mean(1)),
        "equal_prefix_tokens": transform(lambda share: share * new, proportion_interval(prefix.float().mean(1))),
        "repetition": {
            "tokens": REPEATED,
            **{side: proportion_interval(repeated[side]) for side in SIDES},
            "difference": bounded_interval(repeated["converted"] - repeated["original"], -1.0),
        },
        "distinct": {side: {str(n): distinct(texts[side].tolist(), n) for n in (1, 2, 3)} for side in SIDES},
        "perplexity_by_the_original": {
            **{side: perplexity(losses[side]) for side in SIDES},
            "ratio": ratio(losses["converted"], losses["original"]),
        },
        "kl_on_own_text": {side: positive_interval(read[side]["kl"][:, -new:].mean(1)) for side in SIDES},
        "cache_agreement": proportion_interval((texts["converted"][: len(uncached)] == uncached).all(1)),
        "samples": [_sample(tokenizer, *each) for each in islice(zip(prompts.cpu(), *texts.values(), strict=True), SAMPLES)],
    }


def _continuations(models: Models, prompts: Tensor, new: int) -> dict[str, Tensor]:
    show, done = Progress("continuing prompts", 2 * len(prompts)), 0
    found: dict[str, list[Tensor]] = {side: [] for side in SIDES}
    for begin in range(0, len(prompts), PROMPTS_AT_ONCE):
        part = prompts[begin : begin + PROMPTS_AT_ONCE]
        for side, parts in found.items():
            parts.append(continued(models[side], part, new, cached=True))
            done += len(part)
            show(done)
    return {side: torch.cat(parts) for side, parts in found.items()}


def _uncached(model: Any, prompts: Tensor, new: int, seconds: float, say: Callable[[str], None]) -> Tensor:
    """Continue a few prompts without a cache; reading one of them with its continuation takes so many seconds."""
    longest = prompts.shape[1] + new
    expected = duration(seconds * len(prompts) * new * (prompts.shape[1] + new / 2) / longest)
    say(f"check without a cache on {len(prompts)} prompts: {new} passes over up to {longest} tokens, about {expected}")
    return continued(model, prompts, new, cached=False)


def continued(model: Any, prompts: Tensor, new: int, *, cached: bool) -> Tensor:
    """Generate greedily, without the model's own generation settings and without stopping at an end token."""
    plain = type(model.generation_config)  # the model's own settings may sample, or penalise repetition
    model.generation_config = plain(max_new_tokens=new, do_sample=False, pad_token_id=0, use_cache=cached)
    ids: Tensor = model.generate(prompts, attention_mask=torch.ones_like(prompts))
    return ids[:, prompts.shape[1] :]


def repetition(texts: Tensor, n: int = REPEATED) -> Tensor:
    """Return for every text the share of its n-grams that stand earlier in it.

    >>> repetition(torch.tensor([[1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 5, 6]]), n=2).tolist()
    [0.6000000238418579, 0.0]
    """
    return torch.tensor([1 - distinct([text], min(n, len(text))) for text in texts.tolist()])


def distinct(texts: Sequence[Sequence[int]], n: int) -> float:
    """Return the number of different n-grams divided by the number of n-grams.

    >>> distinct([[1, 2, 1, 2], [1, 2]], 2)
    0.5
    """
    grams = [tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)]
    return len(set(grams)) / max(1, len(grams))


def _sample(tokenizer: Any, prompt: Tensor, original: Tensor, converted: Tensor) -> dict[str, Any]:
    """Return the text of a prompt, of the beginning that both continuations share, and of the rest of each."""
    equal = int((original == converted).cumprod(0).sum())
    shared = torch.cat([prompt, original[:equal]])
    begin, common = (tokenizer.decode(ids) for ids in (prompt, shared))
    rest = {
        side: tokenizer.decode(torch.cat([prompt, text])).removeprefix(common)
        for side, text in (("original", original), ("converted", converted))
    }
    return {"prompt": begin, "equal_tokens": equal, "equal": common.removeprefix(begin), **rest}
