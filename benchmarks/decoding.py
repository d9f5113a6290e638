"""Decoding against the original with its key/value cache as the context grows: tokens per second, and bytes of the cache.

Command: python -m benchmarks.performance --only decoding; about five minutes on two cores.
Expected: the original slows down with the context, the students do not; at 256 tokens every kind is as fast as the original,
at 4096 more than twice as fast, and their caches are as large at 8192 tokens as at 256.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import segue
from benchmarks import machine, mixers
from benchmarks.bars import Bar
from benchmarks.mixers import MB, SOFTMAX, WALL_SHARE, at, few
from benchmarks.settings import Settings
from benchmarks.timing import Ratio, rounds

SITES = "model.layers.*.self_attn"
STATIC = "softmax, static cache"  # of fixed length, written in place; the usual one is copied for every token
ORIGINALS = (SOFTMAX, STATIC)
OPERATORS = {
    name: mixers.OPERATORS[name]
    for name in ("linear, elu", "linear, hedgehog", "gated linear", "gated delta", "Performer", "window", "window + linear")
}
LINEAR = tuple(name for name in OPERATORS if name != "window")  # kinds that sum over keys: the window alone is softmax
PIECE = 512  # tokens that are read at a time
REPEATS = 4  # steps in a row, whose mean counts


def measure(settings: Settings) -> dict[str, Any]:
    """Read a text once with every model, stop at every length, and time the next token there, all in turn."""
    threads, seconds, judged = torch.get_num_threads(), settings.seconds("decoding"), settings.judged_context
    with torch.no_grad():
        moments = reading(settings)
        sizes = {key: moment.bytes() for key, moment in moments.items()}
        names = list(dict.fromkeys(name for _, name in moments))
        groups = [[f"{tokens}/{name}" for name in names] for tokens in settings.contexts]
        steps = {f"{tokens}/{name}": moment.step for (tokens, name), moment in moments.items()}
        options: dict[str, Any] = {"least": settings.least_rounds, "repeats": dict.fromkeys(steps, REPEATS)}
        torch.set_num_threads(1)  # and the processor's clock: what others do on the machine counts least
        try:
            times = rounds(steps, (1 - WALL_SHARE) * seconds, groups=groups, clock=time.process_time, **options)
        finally:
            torch.set_num_threads(threads)
        wall = rounds({name: moments[judged, name].step for name in names}, WALL_SHARE * seconds, least=settings.least_rounds)
    return {
        "model": settings.decoder,
        "parameters": sum(p.numel() for p in moments[judged, SOFTMAX].model.parameters()),
        "transformers": machine.version("transformers"),
        "judged_at": judged,
        "points": [
            {
                "tokens": tokens,
                "bytes": {name: sizes[tokens, name] for name in names},
                "milliseconds": {name: times[f"{tokens}/{name}"] for name in names},
            }
            for tokens in settings.contexts
        ],
        "wall": {"threads": threads, "milliseconds": wall},
    }


class Moment:
    """A model that has read some tokens, about to decode the next one, as often as it is asked to.

    The cache stays as long as it is. The original's is what it was; a student's state, which is written in place, is not.
    """

    def __init__(self, model: nn.Module, cache: Any, token: Tensor) -> None:
        self.model, self.cache, self.token = model, cache, token
        self.tokens = int(cache.get_seq_length())
        self.before = [dict(layer.__dict__) for layer in cache.layers]

    def step(self) -> None:
        for layer, before in zip(self.cache.layers, self.before, strict=True):
            layer.__dict__.update(before)
            if isinstance(before.get("cumulative_length"), Tensor):  # of a static layer, counted in place
                layer.cumulative_length.fill_(self.tokens)
        self.model(self.token, past_key_values=self.cache, use_cache=True)

    def bytes(self) -> int:
        """Count what the cache keeps alive."""
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held(self.before)}
        return sum(storages.values())


def held(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors that a cache consists of; counters are left out."""
    if isinstance(tree, Tensor):
        if tree.dim():
            yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from held(value)


def reading(settings: Settings) -> dict[tuple[int, str], Moment]:
    """Let every model read, and copy its cache at every length."""
    from transformers import DynamicCache

    torch.manual_seed(0)
    original = build(settings)
    ids = torch.randint(original.config.vocab_size, (1, settings.contexts[-1]))
    moments = {}
    for name in (SOFTMAX, *OPERATORS):
        model = converted(original, name) if name in OPERATORS else original
        cache, begin = DynamicCache(config=original.config), 0
        for tokens in settings.contexts:
            for end in (
                *range(begin + PIECE, tokens - 1, PIECE),
                tokens - 1,
                tokens,
            ):  # the last one alone: then windows are rings
                model(ids[:, begin:end], past_key_values=cache, use_cache=True, logits_to_keep=1)
                begin = end
            moments[tokens, name] = Moment(model, copy.deepcopy(cache), ids[:, :1])
            if name == SOFTMAX:
                moments[tokens, STATIC] = Moment(model, with_room(cache, original.config), ids[:, :1])
    return moments


def with_room(cache: Any, config: Any) -> Any:
    """Copy a cache into a static one with room for one token more."""
    from transformers import StaticCache

    static = StaticCache(config, max_cache_len=cache.get_seq_length() + 1)
    for place, layer in enumerate(cache.layers):
        static.update(layer.keys, layer.values, place)
    return static


def build(settings: Settings) -> Any:
    """Make a Llama with random weights, on which no speed depends."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**settings.decoder, max_position_embeddings=2 * settings.contexts[-1])).eval()


def converted(original: nn.Module, name: str) -> nn.Module:
    """Return a copy with students in place of all attention."""
    model = copy.deepcopy(original)
    segue.replace_(model, segue.Plan(sites=SITES, student=OPERATORS[name]), total_steps=1).finalize_(force=True)
    return model.eval()


def reference(point: dict[str, Any]) -> str:
    """Return the faster of the two ways in which the original remembers."""
    return min(ORIGINALS, key=lambda name: statistics.median(point[name]))


def students(result: dict[str, Any]) -> list[str]:
    return [name for name in result["points"][0]["bytes"] if name not in ORIGINALS]


def bars(result: dict[str, Any]) -> list[Bar]:
    """Check the slowest students against the faster original, and the cache that grows most."""
    first, last, names = result["points"][0], result["points"][-1], students(result)
    growth = {name: last["bytes"][name] - first["bytes"][name] for name in names}
    most = max(names, key=lambda name: growth[name])
    grows = f"bytes that a student's cache grows by from {first['tokens']} to {last['tokens']} tokens: the most ({most})"
    linear = [name for name in names if name in LINEAR]
    return [
        slowest(at(result, result["judged_at"]), names, f"{len(names)} students"),
        slowest(first, linear, f"{len(linear)} linear kinds"),
        Bar.of_count(grows, growth[most], 0),
    ]


def slowest(point: dict[str, Any], names: list[str], kind: str) -> Bar:
    """Check the slowest of some students after a length against the faster original."""
    spent = point["milliseconds"]
    theirs = reference(spent)
    worst = max(names, key=lambda name: Ratio.of(spent[name], spent[theirs]).median)
    claim = f"decoding one token after {point['tokens']} / the original ({theirs}): the slowest of {kind} ({worst})"
    return Bar.of_ratio(claim, Ratio.of(spent[worst], spent[theirs]), 1.0)


def section(result: dict[str, Any]) -> list[str]:
    """Write what was measured, the tables and the figure."""
    model, points = result["model"], result["points"]
    rounds_taken = len(points[0]["milliseconds"][SOFTMAX])
    return [
        f"A Llama of {model['num_hidden_layers']} layers, width {model['hidden_size']}, {model['num_attention_heads']} heads "
        f"and {result['parameters'] / 1e6:.0f} million parameters, random since no speed depends on them; float32, batch 1. "
        "Every model has read a text of the given length and decodes the next token, again and again at the same length of "
        f"its cache. The original has the two caches of transformers {result['transformers']}: the usual one, which is copied "
        "for every token, and the static one, which is written in place, here with room for one token more. Students stand at "
        "every attention, with windows of 64 tokens, Performer with 256 features. All lengths took turns in one run, on one "
        f"thread, by the processor's clock; {rounds_taken} rounds of {REPEATS} tokens.",
        "",
        "Times faster than the original with its usual cache:",
        "",
        *table(result, lambda p, name: few(Ratio.of(p["milliseconds"][SOFTMAX], p["milliseconds"][name])), "tokens of context"),
        "",
        "Tokens per second:",
        "",
        *table(result, lambda p, name: f"{1000 / statistics.median(p['milliseconds'][name]):.0f}", "tokens of context"),
        "",
        "Cache, MB:",
        "",
        *table(result, lambda p, name: f"{p['bytes'][name] / MB:.2f}", "tokens of context"),
        "",
        wins(result),
        "",
        wall(result),
        "",
        "![Tokens per second and bytes of the cache against the context](figures/performance-decoding.png)",
    ]


def table(result: dict[str, Any], cell: Callable[[dict[str, Any], str], str], corner: str) -> list[str]:
    """Write one row per model and one column per length."""
    lengths = [str(p["tokens"]) for p in result["points"]]
    rows = [
        f"| {name} | " + " | ".join(cell(p, name) for p in result["points"]) + " |" for name in (*ORIGINALS, *students(result))
    ]
    return [f"| {corner} | " + " | ".join(lengths) + " |", "|---" * (1 + len(lengths)) + "|", *rows]


def wins(result: dict[str, Any]) -> str:
    """Say from which length on each student is faster than both originals, by the medians."""
    said = []
    for name in students(result):
        faster = [
            statistics.median(p["milliseconds"][name]) < statistics.median(p["milliseconds"][reference(p["milliseconds"])])
            for p in result["points"]
        ]
        place = next((i for i in range(len(faster)) if all(faster[i:])), None)
        said.append(f"{name}, " + ("at none" if place is None else f"from {result['points'][place]['tokens']} tokens on"))
    return "Faster than both originals at every longer context, by the medians: " + "; ".join(said) + "."


def wall(result: dict[str, Any]) -> str:
    """Write the second clock: all threads, time as a user sees it."""
    spent, threads = result["wall"]["milliseconds"], result["wall"]["threads"]
    faster = "; ".join(f"{name} {few(Ratio.of(spent[SOFTMAX], spent[name]))}" for name in (STATIC, *students(result)))
    return (
        f"In wall-clock time, with {threads} threads, at {result['judged_at']} tokens, {len(spent[SOFTMAX])} rounds: the "
        f"original decodes {1000 / statistics.median(spent[SOFTMAX]):.0f} tokens per second; times faster: {faster}."
    )
