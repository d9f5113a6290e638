"""The table of a campaign, for the terminal and for docs/reliability.md."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tests.torture.campaign import FOREIGN, RIGHT, VERDICTS, Part

MOST_FOREIGN = 0.02
HEADINGS = {RIGHT: "refused or resumed rightly"}

HEAD = """# Reliability

What happens when it is killed, lied to, or runs out of disk? `make torture MINUTES={minutes:g} SEED={seed}` attacks Segue in
the ways below: as many seeded attempts as fit into the time, two parts at a time. The command writes this page. It fails if
anything was accepted wrongly, lost, changed although it failed, hung or ended without a reason, or if more than {most:.0%} of
the attempts ended in a foreign error, one that is not Segue's own three lines.

"""
MEANING = """
- **refused or resumed rightly**: a Segue error that says what is wrong, what was found and what to do, with everything as it
  was before; or the identical result: a damaged file that is read has the original's numbers, a killed run ends bit for bit as
  an undisturbed one.
- **lost**: a run that does not resume, or ends otherwise than an undisturbed one; a checkpoint that is gone; memory, time,
  hooks, threads or open files that grow.
- **without a reason**: a process that ends without saying why, or an error that names the wrong place.
"""


def counts(outcomes: list[dict[str, Any]], part: str | None = None) -> list[int]:
    """Return how many attempts there were, and how many of each verdict."""
    found = Counter(outcome["verdict"] for outcome in outcomes if part in (None, outcome["part"]))
    return [sum(found.values()), *(found[verdict] for verdict in VERDICTS)]


def table(parts: list[Part], outcomes: list[dict[str, Any]]) -> str:
    """Return one row for every part, as Markdown."""
    headings = ["", "tried", *(HEADINGS.get(verdict, verdict) for verdict in VERDICTS)]
    rows = [[part.name, *counts(outcomes, part.name)] for part in parts] + [["all", *counts(outcomes)]]
    cells = [headings, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    lines = [
        "| "
        + " | ".join(f"{c:{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def failures(outcomes: list[dict[str, Any]]) -> list[str]:
    """Name everything that must not be; nothing is what a campaign should find."""
    bad = [f"{o['part']}: {o['verdict']}: {o['case']}: {o['detail']}" for o in outcomes if o["verdict"] not in (RIGHT, FOREIGN)]
    foreign = sum(outcome["verdict"] == FOREIGN for outcome in outcomes)
    if foreign > MOST_FOREIGN * len(outcomes):
        bad.append(f"{foreign} of {len(outcomes)} attempts ended in a foreign error, more than {MOST_FOREIGN:.0%}")
    return bad


def write_page(path: Path, parts: list[Part], outcomes: list[dict[str, Any]], *, seed: int, minutes: float) -> None:
    """Write the page: the table, what each part tries, and every attempt that did not end rightly."""
    text = HEAD.format(minutes=minutes, seed=seed, most=MOST_FOREIGN) + table(parts, outcomes) + "\n" + MEANING
    text += "\n## What is tried\n\n" + "".join(f"- **{part.name}**: {part.about}\n" for part in parts)
    for verdict in VERDICTS[1:]:
        found = Counter((o["part"], o["case"], o["detail"]) for o in outcomes if o["verdict"] == verdict)
        if found:
            text += f"\n## {verdict[0].upper()}{verdict[1:]}\n\n"
            text += "".join(f"- {_entry(*what, times)}\n" for what, times in sorted(found.items()))
    path.write_text(text, encoding="utf-8")


def _entry(part: str, case: str, detail: str, times: int) -> str:
    return f"{part}: {_code(case)}{f', {times} times' if times > 1 else ''}: {_code(detail)}"


def _code(text: str) -> str:
    printable = "".join(letter if letter.isprintable() else "?" for letter in text)
    return f"`{printable.replace('`', chr(39))}`" if printable else "no more is known"
