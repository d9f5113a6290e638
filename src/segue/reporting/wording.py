"""Wording: scores, differences and lists as people read them."""

from __future__ import annotations

from dataclasses import dataclass

from segue.reporting.formatting import NOTHING, significant
from segue.reporting.statistics import Difference, Estimate

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


def signed(value: float) -> str:
    """Write three significant digits and the sign."""
    return f"+{significant(value)}" if value >= 0 else significant(value)


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


def seeds_behind(found: Estimate | None) -> str:
    """Say how many seeds a mean is over, where they are not all.

    >>> seeds_behind(Estimate(1.0, None, 1, 2)), seeds_behind(Estimate(1.0, 0.0, 2, 2))
    (' (1 of 2 seeds)', '')
    """
    return "" if found is None or found.whole else f" ({found.n} of {counted(found.asked, 'seed')})"


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
