"""The tables of the matrix, for the terminal and for docs/models.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.matrix import export
from tests.matrix.cells import ABSENT, CRASHED, IGNORES, OPERATORS, OUTCOMES, REFUSED, STUDENTS, WORKS, WRONG
from tests.matrix.record import Cell

MARKS = {WORKS: "yes", IGNORES: "ignore", REFUSED: "no", ABSENT: "", CRASHED: "**crash**", WRONG: "**wrong**"}
EXPORTED = {WORKS: "yes", ABSENT: "", REFUSED: ""}
SHARE = re.compile(r"\d+ of \d+ models with softmax attention \([^)]*\)")
MEASURED = ("LinearAttention", "SlidingWindow")  # the operators whose share is promised

HEAD = """# Models

Which student goes into which model? `make matrix` builds {entries} models with tiny random weights, tries every student
on each and writes this page: {cells} cells, of which {bad} crashed after Segue had accepted them or were silently
wrong. `LinearAttention` and `SlidingWindow` both go into {share}.

It ran with {versions}.{again} A new release of one of these is checked by running it again.

## What a cell proves

- **yes**: teacher and student ran side by side at weight 0.5, forward and backward; the model was finalized, saved and
  reloaded with the identical output. At weight 0 it is the untouched model bit for bit.
- For **attention operators**, before that: `Softmax()` with copied weights, or a window over all tokens, equals the
  teacher on a real batch with padding (relative difference at most 0.001), so the projections, norms, masks, rotations
  and biases are read rightly. The content of padding changes nothing, later tokens change no earlier output of a causal
  model, a model that knows the order of its tokens still does, and greedy generation gives the same tokens with and
  without a cache.
- For **MLPs**, before that: with all units, or at full rank, the student equals its teacher. For **spans**: the
  teacher's view equals the untouched model, and what `save_pretrained` writes, `from_pretrained` reads as the same
  model, unless `replace_` has warned that the configuration cannot describe it.
- **ignore**: it works after a part of the teacher was left out on purpose, such as `ignore=("bias",)`.
- **no**: refused with a reason, below the table, and the model is as it was. An empty cell: the model has no such part.
"""


EXPORT = """## Export

A finalized model is a plain model: `torch.export.export(model, (inputs,))` takes it. `torch.onnx.export(..., dynamo=True)`
(`pip install onnx onnxscript`) takes those whose operations have a translation. `python -m tests.matrix.export` tries it with
{versions}: models of one layer, without padding and without a cache, {models}. What was
exported computes what the model computes. An empty cell: the student does not go into that model.

{table}
"""


def tally(cells: list[Cell]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {student.name: Counter() for student in STUDENTS}
    for cell in cells:
        found[cell["student"]][cell["outcome"]] += 1
    return found


def counts(cells: list[Cell]) -> str:
    """Return how many cells of each student came to which outcome, as Markdown."""
    rows = [[name, *(str(found[outcome]) for outcome in OUTCOMES)] for name, found in tally(cells).items()]
    total = Counter(cell["outcome"] for cell in cells)
    rows.append(["all", *(str(total[outcome]) for outcome in OUTCOMES)])
    return aligned(["student", *OUTCOMES], rows)


def aligned(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in [head, *rows]
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def shares(softmax: set[str], cells: list[Cell]) -> tuple[int, int, int]:
    """Return on how many entries with softmax attention both measured operators work, with ignore too, and their number."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        if cell["entry"] in softmax and cell["student"] in MEASURED:
            found.setdefault(cell["entry"], []).append(cell["outcome"])
    plain = sum(all(outcome == WORKS for outcome in both) for both in found.values())
    ignoring = sum(all(outcome in (WORKS, IGNORES) for outcome in both) for both in found.values())
    return plain, ignoring, len(found)


def share_text(softmax: set[str], cells: list[Cell]) -> str:
    """Say the share that README and docs/operators.md repeat."""
    plain, ignoring, total = shares(softmax, cells)
    percent = [f"{count / max(1, total):.0%}" for count in (ignoring, plain)]
    return f"{ignoring} of {total} models with softmax attention ({percent[0]}; {percent[1]} without ignoring anything)"


def kept_share(entries: list[dict[str, Any]]) -> str:
    """Say the share of the kept form."""
    return share_text({entry["entry"] for entry in entries if entry["softmax"]}, flattened(entries))


def repeat(said: str, paths: Iterable[Path]) -> None:
    """Write the share into the pages that repeat it."""
    for path in paths:
        text = SHARE.sub(said, path.read_text(encoding="utf-8"))
        assert said in text, f"{path.name} does not say the share"
        path.write_text(text, encoding="utf-8")


def flattened(entries: list[dict[str, Any]]) -> list[Cell]:
    """Return the cells of the kept form."""
    return [
        {"entry": entry["entry"], "student": student, "outcome": outcome}
        for entry in entries
        for student, outcome in entry["cells"].items()
    ]


def write(path: Path, head: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    path.write_text(text(head, entries), encoding="utf-8")


def text(head: dict[str, Any], entries: list[dict[str, Any]]) -> str:
    """Return the page: what it proves, the counts, and every source's table with its refusals."""
    cells = flattened(entries)
    bad = sum(cell["outcome"] in (CRASHED, WRONG) for cell in cells)
    versions = ", ".join(f"{name} {number}" for name, number in head["versions"].items())
    tried = sum(cell["outcome"] != ABSENT for cell in cells)
    renewed = sum("code" in entry for entry in entries)
    again = f" {renewed} models were run again after later changes." if renewed else ""
    parts = [
        HEAD.format(
            again=again, entries=len(entries), cells=tried, bad=bad or "none", share=kept_share(entries), versions=versions
        ),
        "## Counts\n\n" + counts(cells) + "\n",
        export_part(),
    ]
    sources = dict.fromkeys(entry["entry"].split()[0] for entry in entries)
    for source in sources:
        parts.append(section(source, [entry for entry in entries if entry["entry"].split()[0] == source]))
    return "\n".join(parts)


def export_part() -> str:
    """Return the part on leaving PyTorch, from what `python -m tests.matrix.export` has kept."""
    found = export.kept()
    versions = " and ".join(f"{name} {number}" for name, number in found["versions"].items() if name != "onnx")
    models = " and ".join(f"`{name}` ({kind})" for kind, name in export.MODELS.items())
    head = ["student", *(f"{how}, {kind}" for how in ("`torch.export`", "ONNX") for kind in export.MODELS), "why not"]
    rows = []
    for name, kinds in found["students"].items():
        texts = [kinds[kind][how] for how in ("export", "onnx") for kind in export.MODELS]
        reasons = dict.fromkeys(text for text in texts if text not in EXPORTED)
        rows.append([name, *(EXPORTED.get(text, "no") for text in texts), "; ".join(reasons)])
    return EXPORT.format(versions=versions, models=models, table=aligned(head, rows))


def section(source: str, entries: list[dict[str, Any]]) -> str:
    """Return the tables of a source: attention, then the other students; then what was said about each entry."""
    names = {entry["entry"]: entry["entry"].removeprefix(f"{source} ") for entry in entries}
    operators = ["Reinit", *OPERATORS]
    others = [student.name for student in STUDENTS if student.name not in operators]
    lines = [f"## {source}\n"]
    for columns in (operators, others):
        shown = [entry for entry in entries if any(entry["cells"][column] != ABSENT for column in columns)]
        rows = [[names[entry["entry"]], *(MARKS[entry["cells"][column]] for column in columns)] for entry in shown]
        lines += [aligned(["", *columns], rows), ""]
    said = [f"- **{names[entry['entry']]}**: {_said(entry)}" for entry in entries if entry["said"]]
    if said:
        lines += [
            '<details markdown="1">',
            f"<summary>What is refused in {source}, and why</summary>",
            "",
            *said,
            "",
            "</details>",
            "",
        ]
    return "\n".join(lines)


def _said(entry: dict[str, Any]) -> str:
    return " ".join(f"{', '.join(students)}: `{_code(what)}`." for what, students in entry["said"].items())


def _code(what: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in what).replace("`", "'").replace("|", "/")
