"""Bars: what is promised, compared with what is measured.

Command: none of its own.
Expected: every bar met; the page says so where one is missed, and where the noise is too large to tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.timing import Ratio


@dataclass(frozen=True)
class Bar:
    """One promise with its measurement; what the noise does not resolve is marked."""

    claim: str
    measured: str
    limit: str
    verdict: str

    @property
    def missed(self) -> bool:
        return self.verdict.startswith("missed")

    @classmethod
    def of_ratio(cls, claim: str, ratio: Ratio, limit: float) -> Bar:
        if ratio.median <= limit:
            verdict = "met" if ratio.high <= limit else "met, but the interval reaches beyond"
        else:
            verdict = "missed" if ratio.low > limit else "missed, but within the interval"
        return cls(claim, ratio.fine, f"at most {limit:.2f}", verdict)

    @classmethod
    def of_count(cls, claim: str, value: float, limit: float, unit: str = "") -> Bar:
        bar = f"at most {limit:,.0f}{unit}" if limit else "0"
        return cls(claim, f"{value:,.0f}{unit}", bar, "met" if value <= limit else "missed")

    @classmethod
    def apart(cls, claim: str, lower: Ratio, upper: Ratio) -> Bar:
        """Ask that one interval ends before the other begins."""
        if lower.high < upper.low:
            verdict = "met"
        else:
            verdict = "missed, but the median is lower" if lower.median < upper.median else "missed"
        return cls(claim, f"{lower.fine} against {upper.fine}", "intervals apart", verdict)

    @classmethod
    def not_measured(cls, claim: str, why: str, limit: str) -> Bar:
        return cls(claim, "not measured", limit, why)


def table(bars: Iterable[Bar]) -> list[str]:
    """Write the bars as Markdown."""
    rows = [f"| {bar.claim} | {bar.measured} | {bar.limit} | {bar.verdict} |" for bar in bars]
    return ["| claim | measured | bar | |", "|---|---|---|---|", *rows]
