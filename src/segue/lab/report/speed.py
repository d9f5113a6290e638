"""Speed: how much faster a student answers than its teacher, by the length of the sequence, from a file beside the runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.errors import ResultError

FORMAT = 1
FILE = "speed.json"


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
    """One operator at one length, beside its teacher."""

    tokens: int
    faster: Faster
    milliseconds: float  # the median
    operations: float | None  # of one forward, relative to the teacher's
    parameters: float | None  # relative to the teacher's


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What was measured: every operator at every length."""

    setting: str  # sizes of the module, in words
    where: str  # the machine, in words
    students: dict[str, str]  # the settings of every operator, by name
    timed: dict[str, list[Timed]]  # by operator, short sequences first

    @property
    def tokens(self) -> list[int]:
        """List the lengths."""
        return sorted({one.tokens for points in self.timed.values() for one in points})


def read(folder: Path) -> Speed | None:
    """Read the times beside runs; None if nobody took any."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r}, and this version reads {FORMAT}")
        return understood(data)
    except (OSError, KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise ResultError(
            f"the times in {path} were to be read.",
            f"It is not what experiments/operators/speed.py writes ({type(error).__name__}: {error}).",
            "delete it, or measure again.",
        ) from None


def understood(data: Mapping[str, Any]) -> Speed:
    """Turn the file's own data into what the report shows."""
    timed: dict[str, list[Timed]] = {name: [] for name in data["students"]}
    for point in sorted(data["points"], key=lambda point: int(point["tokens"])):
        for name, student in point["students"].items():
            timed.setdefault(name, []).append(_timed(int(point["tokens"]), point["teacher"], student))
    machine = data["machine"]
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    return Speed(
        setting=f"width {data['width']}, {data['heads']} heads, batch {data['batch']}, float32",
        where=f"{machine['cpu']}, {threads}, by the {data['clock']} clock",
        students={name: str(words) for name, words in data["students"].items()},
        timed={name: points for name, points in timed.items() if points},
    )


def _timed(tokens: int, teacher: Mapping[str, Any], student: Mapping[str, Any]) -> Timed:
    return Timed(
        tokens=tokens,
        faster=Faster.of(teacher["milliseconds"], student["milliseconds"]),
        milliseconds=statistics.median(student["milliseconds"]),
        operations=_share(student.get("operations"), teacher.get("operations")),
        parameters=_share(student.get("parameters"), teacher.get("parameters")),
    )


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
