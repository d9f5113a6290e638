"""What a comparison found, as rows of a table and as sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from segue.reporting.formatting import counted, duration, interval, memory, percent_interval, significant


class Row(NamedTuple):
    """One quantity of both models."""

    what: str
    original: str
    converted: str
    compared: str = ""


def rows(results: dict[str, Any]) -> list[Row]:
    """Tell what was measured, the quality first."""
    if results["kind"] == "encoder":
        return [*_of_embeddings(results), *_speed(results), *_size(results)]
    quality = [_perplexity(results)] if results["kind"] in ("causal", "masked") else []
    quality += [
        Row(_hits(results), percent_interval(results["hit"]["original"]), percent_interval(results["hit"]["converted"]))
    ]
    both = [
        Row("same first choice", "", "", percent_interval(results["same_first_choice"])),
        Row("KL divergence, nats", "", "", interval(results["kl"])),
    ]
    return [*quality, *both, *(_greedy(results) if results["kind"] == "causal" else []), *_speed(results), *_size(results)]


def sentences(results: dict[str, Any]) -> list[str]:
    """Say how far the numbers reach."""
    examples, meta = results["examples"], results["meta"]
    said = [
        f"One conversion, one seed: {counted(len(results['replaced']['sites']), 'site')} replaced by "
        f"{results['replaced']['student']}, {results['replaced']['steps']:,} steps.",
        f"Judged by {examples['count']:,} {examples['what']} of {results['data']['name']}, {_unseen(results)}. "
        "Intervals take them as independent. Other data gives other numbers.",
        f"Both models in float32 on {results['device']}, {counted(meta['hardware']['threads'], 'thread')}, in "
        f"{duration(meta['seconds'])}. Times are of this machine, as busy as it was.",
    ]
    if results["contexts_left_out"]:
        left = ", ".join(f"{context:,}" for context in results["contexts_left_out"])
        said.append(f"Left out, because the original has no positions for it: {left} tokens.")
    return said


def _unseen(results: dict[str, Any]) -> str:
    held = results["data"]["held_out_by_the_conversion"]
    return (
        "which the conversion held out" if held else "which this command was given: whether the conversion saw it is not known"
    )


def _perplexity(results: dict[str, Any]) -> Row:
    found = results["perplexity"]
    ratio = interval(results["perplexity_ratio"], lambda value: f"{value:.3f}", " times")
    return Row("perplexity", interval(found["original"]), interval(found["converted"]), ratio)


def _hits(results: dict[str, Any]) -> str:
    return {"causal": "next token guessed", "masked": "hidden token guessed"}.get(results["kind"], "accuracy")


def _greedy(results: dict[str, Any]) -> list[Row]:
    greedy = results["greedy"]
    same = greedy["cache_changes_nothing"]
    return [
        Row("greedy until they part", "", "", f"{interval(greedy['first_tokens_equal'])} of {greedy['new_tokens']} tokens"),
        Row("greedy tokens equal", "", "", percent_interval(greedy["equal_tokens"])),
        Row("cache changes nothing", "", f"{round(same['mean'] * same['n'])} of {counted(same['n'], 'prompt')}"),
    ]  # fmt: skip


def _of_embeddings(results: dict[str, Any]) -> list[Row]:
    found = [Row("cosine of the two embeddings", "", "", interval(results["cosine"]))]
    if results["same_neighbour"] is not None:
        found.append(Row("same nearest neighbour", "", "", percent_interval(results["same_neighbour"])))
    return found


def _speed(results: dict[str, Any]) -> list[Row]:
    causal, measured = results["kind"] == "causal", results["speed"]
    found = []
    for context in sorted({row["context"] for row in measured}):
        rates = {row["model"]: row["tokens_per_second"] for row in measured if row["context"] == context}
        unit = "images" if results["images"] else "tokens"
        what = f"tokens/s at {context:,}" if causal else f"{unit}/s, {context:,} at once"
        found.append(_side_by_side(what, rates, lambda rate: f"{rate:,.0f}"))
    for key, name in (("cache_bytes", "cache"), ("peak_bytes", "peak")) if causal else ():
        longest = max(row["context"] for row in measured)
        sizes = {row["model"]: row[key] for row in measured if row["context"] == longest}
        found.append(_side_by_side(f"{name} at {longest:,}", sizes, memory))
    return found


def _size(results: dict[str, Any]) -> list[Row]:
    return [_side_by_side("parameters", results["parameters"], lambda count: f"{count:,}")]


def _side_by_side(what: str, values: dict[str, Any], write: Callable[[Any], str]) -> Row:
    original, converted = values["original"], values["converted"]
    times = "equal" if original == converted else f"{significant(converted / original)} times"
    return Row(what, write(original), write(converted), times)
