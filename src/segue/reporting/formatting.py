"""Formatting: every number and list that a page, figure or table writes as text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from segue.reporting.statistics import Difference, Estimate, Interval

NOTHING = "\u2013"  # a dash
PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")
LONGEST = 60  # letters of a label inside a sentence
FALLING = ("perplexity", "loss")  # scores of which less is better
FRACTIONS = ("acc", "top", "f1", "auc")  # scores with these in their names run from 0 to 1 and are written in percent


@dataclass(frozen=True)
class ScoreFormat:
    """How a score is written: in percent and points, or as a number."""

    percent: bool

    @classmethod
    def of(cls, score: str, values: list[float]) -> ScoreFormat:
        """Choose the format of a score by its name and its values."""
        return cls(any(part in score.lower() for part in FRACTIONS) and all(0 <= value <= 1 for value in values))

    def value(self, value: float | None) -> str:
        """Format one value."""
        if value is None:
            return NOTHING
        return f"{100 * value:.1f} %" if self.percent else significant(value)

    def estimate(self, found: Estimate | None) -> str:
        """Format a mean with the half width of its interval."""
        if found is None:
            return NOTHING
        text = f"{100 * found.mean:.1f}" if self.percent else significant(found.mean)
        if found.half is not None:
            text += f" ± {100 * found.half:.1f}" if self.percent else f" ± {significant(found.half)}"
        return f"{text} %" if self.percent else text

    def change(self, value: float, *, unit: bool = True) -> str:
        """Format a difference with its sign."""
        text = f"{100 * value:+.1f}" if self.percent else signed(value)
        text = text.replace("-", "\u2212")
        return f"{text} points" if self.percent and unit else text

    def difference(self, found: Difference) -> str:
        """Format a difference with its interval."""
        if found.half is None:
            return self.change(found.mean)
        low, high = (self.change(found.mean + side * found.half, unit=False) for side in (-1, 1))
        return f"{self.change(found.mean)} ({low} to {high})"


def significant(value: float) -> str:
    """Format a number with three significant digits.

    >>> [significant(value) for value in (0.012345, 3.14159, 271.8, 31415.9, 1.2e-7, 0.0)]
    ['0.0123', '3.14', '272', '31416', '1.2e-07', '0']
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else NOTHING
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def signed(value: float) -> str:
    """Format a number with three significant digits and its sign."""
    return f"+{significant(value)}" if value >= 0 else significant(value)


def interval(found: Interval, write: Callable[[float], str] = significant, unit: str = "") -> str:
    """Format a mean with its interval.

    >>> interval({"mean": 2.0, "low": 1.5, "high": 2.5, "n": 9}), interval({"mean": 2.0, "low": None, "high": None, "n": 1})
    ('2 (1.5 to 2.5)', '2')
    """
    if found["mean"] is None:
        return NOTHING
    if found["low"] is None:
        return f"{write(found['mean'])}{unit}"
    return f"{write(found['mean'])}{unit} ({write(found['low'])} to {write(found['high'])})"


def percent_interval(found: Interval) -> str:
    """Format a proportion with its interval in percent.

    >>> percent_interval({"mean": 0.5, "low": 0.4, "high": 0.6, "n": 9})
    '50.0 % (40.0 to 60.0)'
    """
    return interval(found, lambda value: f"{100 * value:.1f}", " %")


def p_value(value: float | None) -> str:
    """Format a p-value.

    >>> [p_value(value) for value in (None, 0.00004, 0.0123, 0.5)]
    ['\u2013', '< 0.001', '0.012', '0.50']
    """
    if value is None:
        return NOTHING
    if value < 0.001:
        return "< 0.001"
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def duration(seconds: float | None) -> str:
    """Format a time span.

    >>> [duration(seconds) for seconds in (0.0123, 7.25, 80, 7500, 200000)]
    ['12.3 ms', '7.25 s', '1 min 20 s', '2 h 5 min', '2 d 8 h']
    """
    if seconds is None:
        return NOTHING
    if seconds < 1:
        return f"{significant(seconds * 1000)} ms" if seconds else "0 s"
    if seconds < 59.95:
        return f"{significant(seconds)} s"
    if (rounded := round(seconds)) < 3600:
        return _two_units(rounded, 60, "min", "s")
    if (rounded := round(seconds / 60)) < 24 * 60:
        return _two_units(rounded, 60, "h", "min")
    return _two_units(round(seconds / 3600), 24, "d", "h")


def flops(value: float | None) -> str:
    """Format a number of floating-point operations.

    >>> [flops(value) for value in (0, 1234.0, 12.34e12, 5.6e18)]
    ['0 FLOPs', '1.23 kFLOPs', '12.3 TFLOPs', '5.6 EFLOPs']
    """
    return NOTHING if value is None else _prefixed(value, 1000, PREFIXES, "FLOPs")


def work_unit(most: float) -> tuple[float, str]:
    """Return a unit for operations up to this many, and its name.

    >>> work_unit(2.5e12), work_unit(0.0)
    ((1000000000000.0, 'TFLOPs'), (1.0, 'FLOPs'))
    """
    power = min(len(PREFIXES) - 1, max(0, math.floor(math.log10(most) / 3))) if most > 0 else 0
    return 1000.0**power, f"{PREFIXES[power]}FLOPs"


def memory(value: float | None) -> str:
    """Format a number of bytes.

    >>> memory(1610612736)
    '1.5 GiB'
    """
    return NOTHING if value is None else _prefixed(value, 1024, ("", "Ki", "Mi", "Gi", "Ti", "Pi"), "B")


def counted(count: int, name: str) -> str:
    """Format a count with its noun.

    >>> counted(1, "seed"), counted(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def seeds_behind(found: Estimate | None) -> str:
    """Name the number of seeds of a mean where some have no value, as in ' (1 of 2 seeds)'."""
    return "" if found is None or found.complete else f" ({found.n} of {counted(found.asked, 'seed')})"


def listed(names: list[str], most: int = 10) -> str:
    """Join names as a sentence does; long names and long lists are cut.

    >>> listed(["a", "b", "c"]), listed(["a", "b", "c", "d"], most=2)
    ('a, b and c', 'a, b and 2 more')
    """
    shown = [shortened(name, LONGEST) for name in names[:most]]
    if len(names) > most:
        shown.append(f"{len(names) - most} more")
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0] if shown else NOTHING


def shortened(text: str, most: int = LONGEST) -> str:
    """Remove the middle of a text that is too long.

    >>> shortened("encoder.layer.11.attention", 16)
    'encoder…ttention'
    """
    text = " ".join(text.split())
    left = (most - 1) // 2
    return text if len(text) <= most else f"{text[:left]}…{text[len(text) - (most - 1 - left) :]}"


def _prefixed(value: float, base: int, prefixes: tuple[str, ...], unit: str) -> str:
    power = 0
    while abs(value) >= 0.9995 * base and power < len(prefixes) - 1:
        value /= base
        power += 1
    return f"{significant(value)} {prefixes[power]}{unit}"


def _two_units(count: int, per: int, large: str, small: str) -> str:
    most, rest = divmod(count, per)
    return f"{most} {large} {rest} {small}" if rest else f"{most} {large}"
