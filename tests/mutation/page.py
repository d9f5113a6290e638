"""The page about the mutants: a table per file, and those that no test can find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.mutation.operators import Mutant

HEAD = """# Planted faults

Who tests the tests? `make mutants` plants one small fault at a time (another comparison, a negated condition, a statement left
out, a copy not made) in a copy of the code, and runs the tests of its package until one fails. The faults are a seeded sample
of all that can be planted, from every file in proportion. The command writes this page.

"""


def write_page(
    path: Path, possible: dict[str, int], results: list[tuple[Mutant, dict[str, Any]]], equivalent: dict[str, str]
) -> None:
    """Write what became of every mutant of the sample."""
    rows = [(file, [row for row in results if row[0].file == file]) for file in possible]
    lines = ["| file | possible | planted | caught | equivalent | not caught |", "|---|---|---|---|---|---|"]
    totals = [0] * 5
    for file, found in rows:
        caught = sum(result["caught"] for _, result in found)
        same = sum(not result["caught"] and mutant.key in equivalent for mutant, result in found)
        numbers = [possible[file], len(found), caught, same, len(found) - caught - same]
        totals = [a + b for a, b in zip(totals, numbers, strict=True)]
        lines.append(f"| `{file}` | {' | '.join(map(str, numbers))} |")
    lines.append(f"| all | {' | '.join(map(str, totals))} |")
    text = HEAD + "\n".join(lines) + "\n"
    for title, listed in (("Equivalent", True), ("Not caught", False)):
        left = [mutant for mutant, result in results if not result["caught"] and (mutant.key in equivalent) is listed]
        if left:
            text += f"\n## {title}\n\n" + "".join(_entry(mutant, equivalent.get(mutant.key)) for mutant in left)
    path.write_text(text, encoding="utf-8")


def _entry(mutant: Mutant, reason: str | None) -> str:
    where = f"`{mutant.file}`" + (f", `{mutant.function}`" if mutant.function else "")
    return f"- {where}: `{mutant.was}` becomes `{mutant.now}`" + (f". {reason}\n" if reason else "\n")
