"""Findings: what a comparison measured, as a table and as sentences, what the converted model is worse in first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from segue.convert.compare import SIDES
from segue.reporting.formatting import counted, duration, interval, memory, percent_interval, significant
from segue.reporting.statistics import Interval

READING, GENERATING, RECALLING = "On held-out text", "When it generates", "When it has to recall"
CHOOSING, RUNNING = "When it has to choose", "Speed and memory"
RECALL = {
    "text": "copied text",
    "words": "copied words",
    "associative": "associative recall",
    "retrieval": "key-value retrieval",
}


FEW = 0.05  # right answers, of all tokens


class Row(NamedTuple):
    """One quantity of both models; `worse` says that the converted one is worse beyond the interval of this row."""

    what: str
    original: str
    converted: str
    compared: str = ""
    worse: bool = False
    part: str = READING


def rows(results: dict[str, Any]) -> list[Row]:
    """Return the table of a comparison, quality first."""
    if results["kind"] == "encoder":
        quality = [Row("cosine of the two embeddings", "", "", interval(results["cosine"]))]
        if results["same_neighbour"] is not None:
            quality.append(Row("same nearest neighbour", "", "", percent_interval(results["same_neighbour"])))
    else:
        quality = _choices(results)
    if results["kind"] == "causal":
        quality += [*_generation(results["greedy"]), *_recall(results.get("recall", {})), *_harness(results.get("harness", []))]
    parameters = _pair("parameters", results["parameters"], lambda count: f"{count:,}")
    return [*quality, *_speed(results), parameters]


def worse(results: dict[str, Any]) -> str:
    """Say in one sentence what the converted model is worse in."""
    found = [f"{row.what} ({(row.compared or row.converted).partition(' (')[0]})" for row in rows(results) if row.worse]
    if not found:
        return "In nothing that is measured here is the converted model worse beyond the 95 % interval."
    return f"Worse than the original, beyond the 95 % interval: {'; '.join(found)}."


def sentences(results: dict[str, Any]) -> list[str]:
    """Say what the numbers are based on."""
    data, counts, meta = results["data"], results["examples"], results["meta"]
    source = "may contain data that the conversion was trained on"
    if data["held_out_by_the_conversion"]:
        source = "the conversion held out"
    found = [
        f"One conversion with one seed: {counted(len(results['replaced']['sites']), 'site')} replaced by "
        f"{results['replaced']['student']}, {results['replaced']['steps']:,} steps.",
        f"Evaluated on {counts['count']:,} {counts['what']} of {data['name']}, which {source}. "
        "The intervals treat them as independent. Other data gives other numbers.",
        f"Both models compute in float32 on {results['device']} with {counted(meta['hardware']['threads'], 'thread')}; the "
        f"comparison took {duration(meta['seconds'])}. Times depend on the machine and on its load.",
    ]
    if results["contexts_omitted"]:
        omitted = ", ".join(f"{context:,}" for context in results["contexts_omitted"])
        found.append(f"Omitted, because the original has too few positions: {omitted} tokens.")
    return found


def branch_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of the branches: the complete converted model, and without each branch; empty if it has none."""
    return [
        (
            f"without {row['without']}" if row["without"] else "complete",
            interval(row["perplexity"]),
            interval(row["kl"]),
            percent_interval(row["same_first_choice"]),
            *(interval(row["loss"][name]) for name in ("text", "associative")),
        )
        for row in results.get("branches", [])
    ]


BRANCH_HEADINGS = ("", "perplexity", "KL, nats", "same first choice", "loss, copied text", "loss, associative recall")


def _choices(results: dict[str, Any]) -> list[Row]:
    found = []
    if results["kind"] in ("causal", "masked"):
        found.append(_both("perplexity", results["perplexity"], interval, _times(results["perplexity_ratio"])))
    accuracy = results["accuracy"]
    difference = _points(accuracy["difference"]) if "difference" in accuracy else ("", False)  # since format 3
    name = {"causal": "next token correct", "masked": "hidden token correct"}.get(results["kind"], "accuracy")
    return [
        *found,
        _both(name, accuracy, percent_interval, difference),
        Row("same first choice", "", "", percent_interval(results["same_first_choice"])),
        Row("KL divergence, nats", "", "", interval(results["kl"])),
    ]


def _generation(greedy: dict[str, Any]) -> list[Row]:
    beginning = f"{interval(greedy['equal_prefix_tokens'])} of {greedy['new_tokens']} tokens"
    found = [
        Row("equal beginning", "", "", beginning, part=GENERATING),
        Row("equal tokens", "", "", percent_interval(greedy["equal_tokens"]), part=GENERATING),
    ]
    if "repetition" in greedy:  # since format 3
        repeated, judged = greedy["repetition"], greedy["perplexity_by_the_original"]
        more = _points(repeated["difference"], worse_if_more=True)
        distinct = {side: greedy["distinct"][side]["2"] for side in SIDES}
        found += [
            _both(f"repeated {repeated['tokens']}-grams", repeated, percent_interval, more, GENERATING),
            _both("distinct 2-grams", distinct, lambda share: f"{100 * share:.1f} %", part=GENERATING),
            _both("perplexity of its text", judged, interval, _times(judged["ratio"]), GENERATING),
            Row("KL divergence on its text, nats", "", "", interval(greedy["kl_on_own_text"]["converted"]), part=GENERATING),
        ]
    same = greedy["cache_agreement"]
    equal = round(same["mean"] * same["n"])
    text = f"{equal} of {counted(same['n'], 'prompt')}"
    return [*found, Row("equal with and without cache", "", text, worse=equal < same["n"], part=GENERATING)]


def _recall(recall: dict[str, Any]) -> list[Row]:
    """Return the nearest and the farthest distance of every kind: right answers, or the gain where the original has few."""
    found = []
    for name, kind in recall.items():
        for one in (kind["rows"][0], kind["rows"][-1])[: len(kind["rows"])]:
            what, shares, gains = f"{RECALL[name]} at {one['distance']}", one["accuracy"], one["gain"]
            if name != "text" and (shares["original"]["low"] or 0) > (kind["chance"] or FEW):  # much of a text is known anyway
                found.append(_both(what, shares, percent_interval, _points(shares["difference"]), RECALLING))
            else:
                found.append(_both(f"{what}, gain", gains, interval, _nats(gains["difference"]), RECALLING))
    return found


def _harness(tasks: list[dict[str, Any]]) -> list[Row]:
    found = []
    for task in tasks:
        name, orders = task["task"], counted(task["orders"], "order")
        found.append(_both(f"{name}, {orders}", task["accuracy"], percent_interval, _points(task["difference"]), CHOOSING))
        if task["orders"] > 1:
            found.append(_both(f"{name}, right in every order", task["in_every_order"], percent_interval, part=CHOOSING))
    return found


def _both(
    what: str, of: dict[str, Any], write: Callable[[Any], str], compared: tuple[str, bool] = ("", False), part: str = READING
) -> Row:
    return Row(what, write(of["original"]), write(of["converted"]), *compared, part)


def _times(found: Interval) -> tuple[str, bool]:
    """Write a ratio, and say whether it is surely more than 1."""
    return interval(found, lambda value: f"{value:.3f}", " times"), _broken(found) or (found["low"] or 0) > 1


def _points(found: Interval, *, worse_if_more: bool = False) -> tuple[str, bool]:
    """Write a difference of two shares, and say whether it is surely for the worse."""
    text = interval(found, lambda value: _signed(f"{100 * value:+.1f}"), " points")
    return text, _broken(found) or ((found["low"] or 0) > 0 if worse_if_more else (found["high"] or 0) < 0)


def _nats(found: Interval) -> tuple[str, bool]:
    """Write a difference of two gains, and say whether it is surely for the worse."""
    return interval(found, lambda value: _signed(f"{value:+.2f}"), " nats"), _broken(found) or (found["high"] or 0) < 0


def _signed(text: str) -> str:
    return text.replace("-", "+" if float(text) == 0 else "\u2212")


def _broken(found: Interval) -> bool:
    """Say whether a model returned inf or NaN."""
    return found["mean"] is None or not math.isfinite(found["mean"])


def _speed(results: dict[str, Any]) -> list[Row]:
    causal, measured = results["kind"] == "causal", results["speed"]
    unit = "images" if results["images"] else "tokens"
    found = []
    for context in sorted({row["context"] for row in measured}):
        rates = {row["model"]: row["tokens_per_second"] for row in measured if row["context"] == context}
        what = f"tokens/s at {context:,}" if causal else f"{unit}/s, {context:,} at once"
        found.append(_pair(what, rates, lambda rate: f"{rate:,.0f}"))
    for key, name in (("cache_bytes", "cache"), ("peak_bytes", "peak memory")) if causal else ():
        longest = max(row["context"] for row in measured)
        sizes = {row["model"]: row[key] for row in measured if row["context"] == longest}
        found.append(_pair(f"{name} at {longest:,}", sizes, memory))
    return found


def _pair(what: str, values: dict[str, Any], write: Callable[[Any], str]) -> Row:
    original, converted = values["original"], values["converted"]
    times = "equal" if original == converted else f"{significant(converted / original)} times"
    return Row(what, write(original), write(converted), times, part=RUNNING)
