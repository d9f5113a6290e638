"""Wording: numbers as people read them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from segue.lab.report.intervals import Difference, Estimate

NOTHING = "\u2013"  # a dash
LONGEST = 60  # letters of a label inside a sentence
SHARES = ("acc", "top", "f1", "auc")  # scores of these names run from 0 to 1 and are read in percent


@dataclass(frozen=True)
class Scale:
    """How the score that counts is written: in percent and points, or as it is."""

    percent: bool

    def value(self, value: float | None) -> str:
        """Write one value."""
        if value is None:
            return NOTHING
        return f"{100 * value:.1f} %" if self.percent else significant(value)

    def estimate(self, found: Estimate | None) -> str:
        """Write a mean with the half width of its interval."""
        if found is None:
            return NOTHING
        text = f"{100 * found.mean:.1f}" if self.percent else significant(found.mean)
        if found.half is not None:
            text += f" ± {100 * found.half:.1f}" if self.percent else f" ± {significant(found.half)}"
        return f"{text} %" if self.percent else text

    def change(self, value: float, *, unit: bool = True) -> str:
        """Write a difference with its sign."""
        text = f"{100 * value:+.1f}" if self.percent else signed(value)
        text = text.replace("-", "\u2212")
        return f"{text} points" if self.percent and unit else text

    def difference(self, found: Difference) -> str:
        """Write a difference with its interval."""
        if found.half is None:
            return self.change(found.mean)
        low, high = (self.change(found.mean + side * found.half, unit=False) for side in (-1, 1))
        return f"{self.change(found.mean)} ({low} to {high})"


def scale_of(score: str, values: list[float]) -> Scale:
    """Choose how a score is written."""
    return Scale(any(share in score.lower() for share in SHARES) and all(0 <= value <= 1 for value in values))


def significant(value: float) -> str:
    """Write three significant digits.

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
    """Write three significant digits and the sign."""
    return f"+{significant(value)}" if value >= 0 else significant(value)


def duration(seconds: float | None) -> str:
    """Write a time span.

    >>> [duration(seconds) for seconds in (0.0123, 7.25, 80, 7500, 200000)]
    ['12.3 ms', '7.25 s', '1 min 20 s', '2 h 5 min', '2 d 8 h']
    """
    if seconds is None:
        return NOTHING
    if seconds < 1:
        return f"{significant(seconds * 1000)} ms" if seconds else "0 s"
    if seconds < 59.95:
        return f"{significant(seconds)} s"
    if (whole := round(seconds)) < 3600:
        return _two_units(whole, 60, "min", "s")
    if (whole := round(seconds / 60)) < 24 * 60:
        return _two_units(whole, 60, "h", "min")
    return _two_units(round(seconds / 3600), 24, "d", "h")


def flops(value: float | None) -> str:
    """Write a number of floating-point operations.

    >>> [flops(value) for value in (0, 1234.0, 12.34e12, 5.6e18)]
    ['0 FLOPs', '1.23 kFLOPs', '12.3 TFLOPs', '5.6 EFLOPs']
    """
    return NOTHING if value is None else _prefixed(value, 1000, ("", "k", "M", "G", "T", "P", "E", "Z"), "FLOPs")


def memory(value: float | None) -> str:
    """Write a number of bytes.

    >>> memory(1610612736)
    '1.5 GiB'
    """
    return NOTHING if value is None else _prefixed(value, 1024, ("", "Ki", "Mi", "Gi", "Ti", "Pi"), "B")


def p_value(value: float | None) -> str:
    """Write a p-value.

    >>> [p_value(value) for value in (None, 0.00004, 0.0123, 0.5)]
    ['\u2013', '< 0.001', '0.012', '0.50']
    """
    if value is None:
        return NOTHING
    if value < 0.001:
        return "< 0.001"
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def listed(names: list[str], most: int = 10) -> str:
    """Join names as a sentence does, long ones and long lists cut short.

    >>> listed(["a", "b", "c"]), listed(["a", "b", "c", "d"], most=2)
    ('a, b and c', 'a, b and 2 more')
    """
    shown = [shortened(name, LONGEST) for name in names[:most]]
    if len(names) > most:
        shown.append(f"{len(names) - most} more")
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0] if shown else NOTHING


def counted(count: int, name: str) -> str:
    """Write a count and what it counts.

    >>> counted(1, "seed"), counted(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def shortened(text: str, most: int) -> str:
    """Take out the middle of a text that is too long.

    >>> shortened("encoder.layer.11.attention", 16)
    'encoder…ttention'
    """
    text = " ".join(text.split())
    keep = most - 1
    return text if len(text) <= most else f"{text[: keep // 2]}…{text[len(text) - (keep - keep // 2) :]}"


def _prefixed(value: float, base: int, prefixes: tuple[str, ...], unit: str) -> str:
    power = 0
    while abs(value) >= 0.9995 * base and power < len(prefixes) - 1:
        value /= base
        power += 1
    return f"{significant(value)} {prefixes[power]}{unit}"


def _two_units(count: int, per: int, large: str, small: str) -> str:
    whole, rest = divmod(count, per)
    return f"{whole} {large} {rest} {small}" if rest else f"{whole} {large}"
