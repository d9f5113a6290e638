"""Amounts: numbers as people read them."""

from __future__ import annotations

import math

NOTHING = "\u2013"  # a dash


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


def _prefixed(value: float, base: int, prefixes: tuple[str, ...], unit: str) -> str:
    power = 0
    while abs(value) >= 0.9995 * base and power < len(prefixes) - 1:
        value /= base
        power += 1
    return f"{significant(value)} {prefixes[power]}{unit}"


def _two_units(count: int, per: int, large: str, small: str) -> str:
    whole, rest = divmod(count, per)
    return f"{whole} {large} {rest} {small}" if rest else f"{whole} {large}"
