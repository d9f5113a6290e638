"""Mixers against torch's softmax attention as the sequence grows: time, memory, and from which length each one wins.

Command: python -m benchmarks.performance --only mixers; about eight minutes on two cores.
Expected: exponents of at most 1.1 for time and memory, and every mixer faster than softmax at 8192 tokens. Fourier costs
N log N, whose slope over these lengths is 1.12.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import machine
from benchmarks.bars import Bar
from benchmarks.settings import Settings
from benchmarks.timing import Ratio, Step, rounds
from segue.diagnostics.counting import PeakBytes, saved_bytes
from segue.students import (
    Fourier,
    GatedDeltaNet,
    GatedLinear,
    LinearAttention,
    Linformer,
    Nystrom,
    Performer,
    SlidingWindow,
    WindowedLinear,
)
from segue.students.attention.module import Operator
from segue.students.attention.spec import AttentionSpec, Projection

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]

OPERATORS: dict[str, Operator] = {
    "linear, elu": LinearAttention(feature_map="elu"),
    "linear, relu": LinearAttention(feature_map="relu"),
    "linear, hedgehog": LinearAttention(feature_map="hedgehog"),
    "gated linear": GatedLinear(),
    "gated delta": GatedDeltaNet(),
    "Performer": Performer(features=256),
    "Linformer": Linformer(rank=64),
    "window": SlidingWindow(window=64),
    "window + linear": WindowedLinear(window=64),
    "Nystrom": Nystrom(landmarks=64),
    "Fourier": Fourier(),
}
SOFTMAX, UNFUSED, FOURIER = "softmax", "softmax, not fused", "Fourier"
CAUSAL = ", causal"
FORWARD, BOTH = "forward", "forward + backward"
PASSES = (FORWARD, BOTH)
BAR_EXPONENT = 1.1
FROM = 1024  # tokens: below, calls weigh more than work
HEADS, HEAD_SIZE = 4, 64
MB = 2**20
REPEATED_BELOW = 4096  # tokens: shorter steps are repeated within a round, so that the clock can see them
MOST_REPEATS = 8
WALL_SHARE = 0.2  # of the time, for the second clock
KEPT = (
    "The allocator keeps what is freed (by `mallopt`; `MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647` does it from "
    "outside): glibc by itself gives large blocks back, and page faults then slow long sequences down."
)
FUSED = (
    "What one operator uses inside is not seen, and the fused softmax needs little: compare softmax as plain "
    "products, which stores all its weights."
)


def measure(settings: Settings) -> dict[str, Any]:
    """Count bytes, then time every mixer at every length in one interleaved run, then once more with all threads."""
    kept = machine.keep_memory()
    lengths, threads, seconds = settings.mixer_tokens, torch.get_num_threads(), settings.seconds("mixers")
    subjects = {tokens: Subjects(tokens, settings) for tokens in lengths}
    memory = {tokens: subject.bytes() for tokens, subject in subjects.items()}
    torch.set_num_threads(1)  # and the processor's clock: what others do on the machine counts least
    try:
        keys = {f"{tokens}/{name}": (tokens, name) for tokens in lengths for name in subjects[tokens].mixes}
        times: dict[str, dict[str, list[float]]] = {}
        for kind in PASSES:
            steps = {key: subjects[tokens].step(name, kind) for key, (tokens, name) in keys.items()}
            repeats = {key: min(MOST_REPEATS, max(1, REPEATED_BELOW // tokens)) for key, (tokens, _) in keys.items()}
            share = (1 - WALL_SHARE) * seconds * (0.3 if kind == FORWARD else 0.7)
            groups = [[key for key in keys if keys[key][0] == tokens] for tokens in lengths]
            times[kind] = rounds(
                steps, share, least=settings.least_rounds, groups=groups, repeats=repeats, clock=time.process_time
            )
    finally:
        torch.set_num_threads(threads)
    return {
        "batch": 1,
        "heads": HEADS,
        "head_size": HEAD_SIZE,
        "judged_at": settings.judged_tokens,
        "keeps_memory": kept,
        "points": [
            {
                "tokens": tokens,
                **memory[tokens],
                "milliseconds": {
                    kind: {name: times[kind][f"{tokens}/{name}"] for name in subjects[tokens].mixes} for kind in PASSES
                },
            }
            for tokens in lengths
        ],
        "wall": {
            "threads": threads,
            "milliseconds": {
                kind: rounds(
                    subjects[settings.judged_tokens].steps(kind), WALL_SHARE * seconds / 2, least=settings.least_rounds
                )
                for kind in PASSES
            },
        },
    }


class Subjects:
    """Every mixer at one length, with queries, keys, values and a gradient to go back with."""

    def __init__(self, tokens: int, settings: Settings) -> None:
        torch.manual_seed(0)
        self.given = [torch.randn(1, HEADS, tokens, HEAD_SIZE, requires_grad=True) for _ in range(3)]
        self.gradient = torch.randn(1, HEADS, tokens, HEAD_SIZE)
        self.weights: list[Tensor] = []
        self.mixes: dict[str, Mix] = {}
        self.counted: dict[str, Mix] = {}
        shape = Projection(torch.empty(HEADS * HEAD_SIZE, HEADS * HEAD_SIZE, device="meta"))
        spec = AttentionSpec(heads=HEADS, head_size=HEAD_SIZE, query=shape, key=shape, value=shape, tokens=tokens)
        if tokens <= settings.longest_softmax:
            self.mixes |= {SOFTMAX: softmax(False), SOFTMAX + CAUSAL: softmax(True)}
        if tokens <= settings.longest_unfused:
            self.counted |= {UNFUSED: unfused(False), UNFUSED + CAUSAL: unfused(True)}
        for name, operator in OPERATORS.items():
            mixer = operator.mixer(spec)
            self.weights += list(mixer.parameters())
            self.mixes[name] = called(mixer, False)
            if mixer.supports_causal:
                self.mixes[name + CAUSAL] = called(mixer, True)

    def step(self, name: str, kind: str) -> Step:
        mix = {**self.mixes, **self.counted}[name]
        given = self.given if kind == BOTH else [x.detach() for x in self.given]

        def forward() -> None:
            with torch.no_grad():
                mix(*given)

        def both() -> None:
            mix(*given).backward(self.gradient)
            for tensor in itertools.chain(given, self.weights):
                tensor.grad = None

        return both if kind == BOTH else forward

    def steps(self, kind: str) -> dict[str, Step]:
        return {name: self.step(name, kind) for name in self.mixes}

    def bytes(self) -> dict[str, dict[str, int]]:
        """Count what autograd saves and the peak of live tensors, without the inputs."""
        held = [*self.given, self.gradient, *self.weights]
        saved, peak = {}, {}
        for name, mix in {**self.mixes, **self.counted}.items():
            saved[name] = saved_bytes(lambda mix=mix: mix(*self.given), held)  # type: ignore[misc]
            with PeakBytes(held) as memory:
                self.step(name, BOTH)()
            peak[name] = memory.peak
        return {"saved": saved, "peak": peak}


def softmax(causal: bool) -> Mix:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def unfused(causal: bool) -> Mix:
    """Return softmax attention that stores all its weights."""

    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return mix


def called(mixer: nn.Module, causal: bool) -> Mix:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed: Tensor = mixer(q, k, v, None, causal)
        return mixed

    return mix


def slope(tokens: Sequence[float], costs: Sequence[float]) -> float:
    """Return the exponent of a cost: the least-squares slope of its logarithm against that of the length."""
    return statistics.linear_regression([math.log(n) for n in tokens], [math.log(cost) for cost in costs]).slope


def long_points(result: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the lengths at which the work outweighs the calls, of those that were measured."""
    measured = [p for p in result["points"] if name in p["peak"]]
    long = [p for p in measured if p["tokens"] >= FROM]
    return long if len(long) > 1 else measured


def exponent(result: dict[str, Any], name: str, kind: str) -> Ratio:
    """Return the exponent of the time, round by round, as a median with its interval."""
    points = long_points(result, name)
    lengths = [p["tokens"] for p in points]
    by_round = zip(*(p["milliseconds"][kind][name] for p in points), strict=True)
    exponents = [slope(lengths, costs) for costs in by_round]
    return Ratio.of(exponents, [1.0] * len(exponents))


def memory_exponent(result: dict[str, Any], name: str) -> float:
    points = long_points(result, name)
    return slope([p["tokens"] for p in points], [p["peak"][name] for p in points])


def fourier_exponent(result: dict[str, Any]) -> float:
    """Return the slope that N log N has over the same lengths."""
    lengths = [p["tokens"] for p in long_points(result, FOURIER)]
    return slope(lengths, [n * math.log(n) for n in lengths])


def reference(name: str) -> str:
    """Return the softmax that sees what a mixer sees."""
    return SOFTMAX + CAUSAL if name.endswith(CAUSAL) else SOFTMAX


def share(times: dict[str, list[float]], name: str) -> Ratio:
    """Return the time of a mixer in that of softmax."""
    return Ratio.of(times[name], times[reference(name)])


def speed_up(times: dict[str, list[float]], name: str) -> Ratio:
    return Ratio.of(times[reference(name)], times[name])


def at(result: dict[str, Any], tokens: int) -> dict[str, Any]:
    point: dict[str, Any] = next(p for p in result["points"] if p["tokens"] == tokens)
    return point


def mixers(result: dict[str, Any]) -> list[str]:
    """Return the measured mixers, without softmax."""
    judged = at(result, result["judged_at"])["milliseconds"][FORWARD]
    return [name for name in judged if not name.startswith(SOFTMAX)]


def wins_from(result: dict[str, Any], name: str, kind: str) -> str:
    """Say from which length on a mixer is faster than softmax, at every longer one too."""
    points = [p for p in result["points"] if reference(name) in p["milliseconds"][kind]]
    wins = [share(p["milliseconds"][kind], name).median < 1 for p in points]
    place = next((i for i in range(len(wins)) if all(wins[i:])), None)
    if place is None:
        return "never"
    return f"{points[place]['tokens']}" if place else f"{points[0]['tokens']} or less"


def bars(result: dict[str, Any]) -> list[Bar]:
    """Check the worst of all mixers."""
    names, tokens = mixers(result), result["judged_at"]
    linear = [name for name in names if name != FOURIER]
    lengths = [p["tokens"] for p in long_points(result, linear[0])]
    span = f"{lengths[0]} to {lengths[-1]} tokens"
    judged = []
    for kind in PASSES:
        worst = max(linear, key=lambda name: exponent(result, name, kind).median)
        claim = f"exponent of the time over {span}, {kind}: the worst of {len(linear)} linear mixers ({worst})"
        judged.append(Bar.of_ratio(claim, exponent(result, worst, kind), BAR_EXPONENT))
    worst = max(linear, key=lambda name: memory_exponent(result, name))
    value = memory_exponent(result, worst)
    claim = f"exponent of the peak memory over {span}: the worst of them ({worst})"
    judged.append(Bar.of_ratio(claim, Ratio(value, value, value), BAR_EXPONENT))
    for kind in PASSES:
        times = at(result, tokens)["milliseconds"][kind]
        worst = max(names, key=lambda name: share(times, name).median)
        claim = f"time at {tokens} tokens / softmax, {kind}: the worst of {len(names)} mixers ({worst})"
        judged.append(Bar.of_ratio(claim, share(times, worst), 1.0))
    return judged


def section(result: dict[str, Any]) -> list[str]:
    """Write what was measured, the tables and the figures."""
    tokens = result["judged_at"]
    return [
        "Every mixer against torch's `scaled_dot_product_attention` (softmax), causal against causal: batch "
        f"{result['batch']}, {result['heads']} heads of {result['head_size']}, float32; Performer with 256 features, Linformer "
        "of rank 64, windows of 64, Nystrom with 64 landmarks. All lengths took turns in one run, on one thread, by the "
        "processor time, which excludes other processes; "
        f"{len(at(result, tokens)['milliseconds'][FORWARD][SOFTMAX])} rounds of {FORWARD} and "
        f"{len(at(result, tokens)['milliseconds'][BOTH][SOFTMAX])} of {BOTH}. Exponents are least-squares slopes of log time "
        f"against log tokens, from {FROM} tokens on." + (f" {KEPT}" if result["keeps_memory"] else ""),
        "",
        *time_table(result),
        "",
        f"*wins from*: the length from which on it is faster than softmax. Fourier costs N log N, whose slope over these "
        f"lengths is {fourier_exponent(result):.2f}; it is not among the linear mixers of the bar.",
        "",
        "![Time against tokens](figures/performance-mixers-time.png)",
        "",
        *wall_table(result),
        "",
        f"Bytes, without those of queries, keys, values and weights. {FUSED}",
        "",
        *memory_table(result, tokens),
        "",
        "![Memory against tokens](figures/performance-mixers-memory.png)",
    ]


def time_table(result: dict[str, Any]) -> list[str]:
    tokens = result["judged_at"]
    lines = [
        f"| mixer | exponent, {FORWARD} | {BOTH} | times faster at {tokens}, {FORWARD} | {BOTH} | "
        f"wins from, {FORWARD} | {BOTH} |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in (SOFTMAX, SOFTMAX + CAUSAL, *mixers(result)):
        cells = [str(exponent(result, name, kind)) for kind in PASSES]
        if name.startswith(SOFTMAX):
            cells += [""] * 4
        else:
            cells += [few(speed_up(at(result, tokens)["milliseconds"][kind], name)) for kind in PASSES]
            cells += [wins_from(result, name, kind) for kind in PASSES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def wall_table(result: dict[str, Any]) -> list[str]:
    """Write the second clock: all threads, time as a user sees it."""
    wall, tokens = result["wall"], result["judged_at"]
    lines = [
        f"The same at {tokens} tokens in wall-clock time, with {wall['threads']} threads; "
        f"{len(wall['milliseconds'][FORWARD][SOFTMAX])} and {len(wall['milliseconds'][BOTH][SOFTMAX])} rounds:",
        "",
        f"| mixer | times faster, {FORWARD} | {BOTH} | median ms, {FORWARD} | {BOTH} |",
        "|---|---|---|---|---|",
    ]
    for name in (SOFTMAX, SOFTMAX + CAUSAL, *mixers(result)):
        faster = [few(speed_up(wall["milliseconds"][kind], name)) for kind in PASSES]
        spent = [f"{statistics.median(wall['milliseconds'][kind][name]):.0f}" for kind in PASSES]
        lines.append(f"| {name} | " + " | ".join(faster + spent) + " |")
    return lines


def memory_table(result: dict[str, Any], tokens: int) -> list[str]:
    point = at(result, tokens)
    lines = [
        f"| mixer | exponent of the peak | saved for backward at {tokens}, MB | peak of {BOTH}, MB |",
        "|---|---|---|---|",
    ]
    counted = list(dict.fromkeys(name for p in result["points"] for name in p["peak"]))
    for name in sorted(counted, key=lambda name: not name.startswith(SOFTMAX)):
        sizes = [f"{point[what][name] / MB:.0f}" if name in point[what] else "not counted" for what in ("saved", "peak")]
        lines.append(f"| {name} | {memory_exponent(result, name):.2f} | " + " | ".join(sizes) + " |")
    return lines


def few(ratio: Ratio) -> str:
    """Write a speed-up with as many digits as it deserves."""
    digits = 0 if ratio.median >= 20 else 1
    return f"{ratio.median:.{digits}f} ({ratio.low:.{digits}f} to {ratio.high:.{digits}f})"
