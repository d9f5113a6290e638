"""How fast each operator is compared with the attention module that it replaces, by the number of tokens.

Command:  python experiments/operators/speed.py --out runs/operators
Runtime:  about two minutes on a free core; less than ten, measured, on two cores at a load of ten.
Expected: measured on one core of an AMD EPYC under that load, in processor time: at 8192 tokens Fourier is 17 times as
          fast as its teacher, Linformer 12, linear attention and Nystrom 10, Performer 9, the sliding window 4.3, windowed
          linear 1.9; at 64 tokens only Fourier is faster at all.

Width 384, 6 heads, batch 1, float32, as in a small ViT. The students are made by their factories from the same teacher, and
their sizes stay fixed while the sequence grows: 64 features, rank, landmarks and window. The report of this experiment
(`python -m experiments.operators.report`) shows the file that this writes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from segue.diagnostics.counting import flops
from segue.errors import ResultError
from segue.lab.small_vit import Attention
from segue.reporting.records import write_json
from segue.sites import Site
from segue.students import (
    Fourier,
    LinearAttention,
    Linformer,
    Nystrom,
    Performer,
    SlidingWindow,
    StudentFactory,
    WindowedLinear,
)

FORMAT = 1
FILE = "speed.json"
WIDTH, HEADS, SIZE = 384, 6, 64
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
TEACHER = ""  # among the modules that take turns; no operator has this name
REPEATED_BELOW = 2048  # tokens: shorter calls are repeated within a round, so that the clock can resolve them


def operators(tokens: int) -> dict[str, StudentFactory]:
    """Return every operator at its fixed size; Linformer alone is made for a length."""
    return {
        "Linear attention": LinearAttention(feature_map="elu"),
        "Performer": Performer(features=SIZE),
        "Linformer": Linformer(rank=SIZE, tokens=tokens),
        "Nystrom": Nystrom(landmarks=SIZE),
        "Sliding window": SlidingWindow(window=SIZE, sinks=1),
        "Windowed linear": WindowedLinear(window=SIZE),
        "Fourier": Fourier(),
    }


SIZES = {
    "Linear attention": "elu",
    "Performer": f"{SIZE} features",
    "Linformer": f"rank {SIZE}",
    "Nystrom": f"{SIZE} landmarks",
    "Sliding window": f"less than {SIZE} away, 1 global token",
    "Windowed linear": f"softmax less than {SIZE} away, hedgehog beyond",
    "Fourier": "no size",
}


def main() -> None:
    """Measure every length, write the file, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/operators"), help="the folder of the runs (%(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="lengths of the sequence (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="number of torch threads (%(default)s)")
    parser.add_argument("--seconds", type=float, default=12.0, help="time for every length (%(default)s)")
    parser.add_argument("--least", type=int, default=5, help="minimum number of rounds, whatever their time (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = measure(sorted(set(options.tokens)), options.seconds, options.least)
    print(write_json(result, options.out / FILE))


def measure(tokens: list[int], seconds: float, least: int) -> dict[str, Any]:
    """Time and count teacher and students at every length."""
    load = [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else []
    return {
        "format": FORMAT,
        "width": WIDTH,
        "heads": HEADS,
        "batch": 1,
        "clock": "processor's" if torch.get_num_threads() == 1 else "wall",
        "students": SIZES,
        "points": [_measured(length, seconds, least) for length in tokens],
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load": load,
            "system": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


def _measured(tokens: int, seconds: float, least: int) -> dict[str, Any]:
    torch.manual_seed(0)
    teacher = Attention(WIDTH, HEADS).eval()
    site = Site("blocks.0.attn")
    modules = {TEACHER: teacher} | {name: make(teacher, site).eval() for name, make in operators(tokens).items()}
    x = torch.randn(1, tokens, WIDTH)
    times = _rounds({name: _forward(module, x) for name, module in modules.items()}, tokens, seconds, least)
    measured = {
        name: {
            "milliseconds": times[name],
            "median": statistics.median(times[name]),
            "operations": _operations(module, tokens),
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
        }
        for name, module in modules.items()
    }
    faster = {name: Faster.of(times[TEACHER], times[name]) for name in modules if name != TEACHER}
    print(
        f"{tokens} tokens, {len(times[TEACHER])} rounds, teacher {measured[TEACHER]['median']:.3g} ms; times faster: ", end=""
    )
    print(", ".join(f"{name} {one.median:.2g} ({one.low:.2g} to {one.high:.2g})" for name, one in faster.items()), flush=True)
    return {"tokens": tokens, "teacher": measured.pop(TEACHER), "students": measured}


def _forward(module: nn.Module, x: Tensor) -> Callable[[], object]:
    return lambda: module(x)


def _rounds(calls: Mapping[str, Callable[[], object]], tokens: int, seconds: float, least: int) -> dict[str, list[float]]:
    """Call the modules in turn, in another order every round, and return milliseconds by round."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter  # the first excludes other processes
    spent: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffle, repeats = list(calls), random.Random(0), max(1, REPEATED_BELOW // tokens)
    with torch.inference_mode():
        for call in calls.values():
            call()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(spent[TEACHER]) < least:
            shuffle.shuffle(order)
            for name in order:
                begun = clock()
                for _ in range(repeats):
                    calls[name]()
                spent[name].append(round(1000 * (clock() - begun) / repeats, 5))
    return spent


def _operations(module: nn.Module, tokens: int) -> int:
    """Count one forward, without memory for it."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        x = torch.empty(1, tokens, WIDTH)
        return flops(lambda: module(x))


def _cpu() -> str:
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Faster:
    """The teacher's time over the student's, round by round: the median, and the middle half of the rounds."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, teacher: Sequence[float], student: Sequence[float]) -> Faster:
        """Divide two lists of times, taken in the same rounds."""
        ratios = [a / b for a, b in zip(teacher, student, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return cls(median, low, high, len(ratios))


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One operator at one length, compared with its teacher."""

    tokens: int
    faster: Faster
    milliseconds: float  # the median
    operations: float | None  # of one forward, relative to the teacher's
    parameters: float | None  # relative to the teacher's


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What was measured: every operator at every length."""

    setting: str  # sizes of the module, as text
    where: str  # the machine, as text
    students: dict[str, str]  # the settings of every operator, by name
    timed: dict[str, list[Timed]]  # by operator, short sequences first

    @property
    def tokens(self) -> list[int]:
        """List the lengths."""
        return sorted({one.tokens for points in self.timed.values() for one in points})


def read(folder: Path) -> Speed | None:
    """Read the times in a folder of runs; None if none were measured."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r}, and this version reads {FORMAT}")
        return parse(data)
    except (OSError, KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise ResultError(
            f"{path} is not a file of measured times.",
            f"experiments/operators/speed.py writes another form ({type(error).__name__}: {error}).",
            "delete it, or measure again.",
        ) from None


def parse(data: Mapping[str, Any]) -> Speed:
    """Turn the data of the file into what the report shows."""
    timed: dict[str, list[Timed]] = {name: [] for name in data["students"]}
    for point in sorted(data["points"], key=lambda point: int(point["tokens"])):
        for name, student in point["students"].items():
            timed.setdefault(name, []).append(_timed(int(point["tokens"]), point["teacher"], student))
    machine = data["machine"]
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    return Speed(
        setting=f"width {data['width']}, {data['heads']} heads, batch {data['batch']}, float32",
        where=f"{machine['cpu']}, {threads}, by the {data['clock']} clock",
        students={name: str(settings) for name, settings in data["students"].items()},
        timed={name: points for name, points in timed.items() if points},
    )


def _timed(tokens: int, teacher: Mapping[str, Any], student: Mapping[str, Any]) -> Timed:
    return Timed(
        tokens=tokens,
        faster=Faster.of(teacher["milliseconds"], student["milliseconds"]),
        milliseconds=statistics.median(student["milliseconds"]),
        operations=_ratio(student.get("operations"), teacher.get("operations")),
        parameters=_ratio(student.get("parameters"), teacher.get("parameters")),
    )


def _ratio(student: float | None, teacher: float | None) -> float | None:
    return None if student is None or not teacher else student / teacher


if __name__ == "__main__":
    main()
