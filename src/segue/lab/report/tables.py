"""Tables: the summary as cells with a text and a number to sort by, as Markdown and as CSV."""

from __future__ import annotations

import csv as csv_writer
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from segue.lab.report import choices, findings, table_one
from segue.lab.report.answer import answer
from segue.reporting.formatting import (
    NOTHING,
    ScoreFormat,
    counted,
    duration,
    flops,
    memory,
    p_value,
    seeds_behind,
    significant,
)
from segue.reporting.statistics import FEWEST, Estimate, TimeTo

if TYPE_CHECKING:
    from segue.lab.report.comparisons import Comparison, Measure
    from segue.lab.report.summary import Group, Held, Method, Summary
    from segue.lab.report.table_one import TableOne


@dataclass(frozen=True)
class Cell:
    """A text and a number to sort by; cells without a number come last."""

    text: str
    sort: float | None = None


@dataclass(frozen=True)
class Column:
    """One column of the table of methods."""

    key: str
    heading: str
    cell: Callable[[Method], Cell]


def columns(group: Group, score_format: ScoreFormat) -> list[Column]:
    """List the columns of the table of methods."""
    found = [
        Column("seeds", "Seeds", lambda method: Cell(str(len(method.seeds)), len(method.seeds))),
        Column("final", f"Final {group.score}", lambda method: _scored(method.final, score_format)),
        Column("area", f"Mean {group.score} over the run", lambda method: _scored(method.area, score_format)),
    ]
    for index, held in enumerate(group.methods[0].held):
        percent = f"{100 * held.fraction:.0f} %"
        found += [
            Column(f"epochs_{index}", f"Epochs to {percent}", _until(index, lambda held: held.epochs, significant)),
            Column(f"seconds_{index}", f"Time to {percent}", _until(index, lambda held: held.seconds, duration)),
            Column(f"flops_{index}", f"Work to {percent}", _until(index, lambda held: held.flops, flops)),
        ]
    return [
        *found,
        Column("step_seconds", "Time per step", lambda method: _plain(method.step_seconds, duration)),
        Column("step_flops", "Work per step", lambda method: _plain(method.step_flops, flops)),
        Column("memory", "Peak memory", lambda method: _plain(method.peak_memory, memory)),
    ]


def cost_columns(group: Group) -> list[Column]:
    """List the columns of costs and variances for which any method has a number."""

    def column(key: str, heading: str, write: Callable[[float], str]) -> Column:
        return Column(key, heading, lambda method: _with_interval(method.table_one.counted[key], write))

    found = [
        Column("variance", "Total variance", lambda method: _with_interval(method.table_one.variance, significant)),
        Column(
            "to_prediction",
            "Gates' variance / formula",
            lambda method: _with_interval(method.table_one.to_prediction, significant),
        ),
        column("to_student_only", "Operations / student-only", _ratio),
        column("to_distillation", "Operations / full teacher", _ratio),
        column("blend_to_student_only", "A blend step / student-only", _ratio),
        column("bytes_to_student_only", "Saved bytes / student-only", _ratio),
        column("extra_parameters", "Extra parameters in memory", lambda value: f"{value:,.0f}"),
        Column("break_even", "Break-even modules", lambda method: _break_even(method.table_one)),
    ]
    return [column for column in found if any(column.cell(method).text != NOTHING for method in group.methods)]


def shown_aspects(group: Group) -> list[table_one.Aspect]:
    """List the columns of Table 1 that these runs can fill; none if they measured neither variance nor operations."""
    rows = [method.table_one for method in group.methods]
    if not any(row.varies or row.costs for row in rows):
        return []
    return [aspect for aspect in table_one.ASPECTS if any(aspect.measured(row) != NOTHING for row in rows)]


def compared(comparison: Comparison, score_format: ScoreFormat) -> list[Cell]:
    """Format one comparison as cells, in the order of `COMPARED`."""
    difference = comparison.difference
    return [
        Cell(comparison.label),
        Cell(comparison.reference_label),
        Cell(score_format.difference(difference), difference.mean),
        Cell(str(difference.pairs), difference.pairs),
        Cell(p_value(difference.p), difference.p),
        Cell(p_value(difference.exact), difference.exact),
        Cell(p_value(comparison.holm), comparison.holm),
        Cell(findings.verdict(comparison)),
    ]


def compared_rows(group: Group, measure: Measure, score_format: ScoreFormat) -> list[list[Cell]]:
    """Return the comparisons of one measure; none with one seed, when they say nothing."""
    found = [] if group.one_seed else group.comparisons
    return [compared(comparison, score_format) for comparison in found if comparison.measure == measure]


ROUNDING = 1e-9  # of a mean: less is no spread
COMPARED = ["Method", "Reference", "Difference (95 % interval)", "Pairs", "p", "p, exact", "p, Holm", "Verdict"]
FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")  # what a spreadsheet takes for the begin of one; the last four are wide
MARKS = {"best": "best", "like the best": "≈ best", "worse": "", "unknown": ""}


def markdown(summary: Summary) -> str:
    """Write every group's tables as Markdown."""
    parts = ["# Results", "", *bullets(answer(summary)), *bullets(findings.overview(summary)), *bullets(summary.notes)]
    if len(summary.groups) > 1:
        parts += ["", "## Where each method wins and loses", "", *_wins(summary)]
    for group in summary.groups:
        parts += ["", f"## {escaped(group.name)}", "", *bullets(group.findings), *bullets(group.notes), ""]
        shown = columns(group, summary.score_format)
        parts += as_table(
            ["Method", *(column.heading for column in shown)],
            [[method.label, *(column.cell(method).text for column in shown)] for method in group.methods],
        )
        for measure in findings.MEASURE_NAMES:
            if rows := compared_rows(group, measure, summary.score_format):
                name = findings.measure_name(measure, group.score)
                parts += ["", f"Paired differences, {name}:", ""]
                parts += as_table(COMPARED, [[cell.text for cell in row] for row in rows])
        if chosen := choices.rows(group, summary.score_format):
            parts += ["", f"### {choices.TITLE}", "", *as_table(choices.CHOSEN, chosen), "", choices.reading(group)]
        parts += _table_one(group)
    return "\n".join([*parts, "", _legend(summary), ""])


def csv(summary: Summary) -> str:
    """Write one row of plain numbers per group and method; what is unknown is empty."""
    return as_csv([_numbers(group, method) for group in summary.groups for method in group.methods])


def _table_one(group: Group) -> list[str]:
    aspects, numbers = shown_aspects(group), cost_columns(group)
    if not aspects:
        return []
    headings = [heading for aspect in aspects for heading in (aspect.heading, "The paper", "Holds")]
    claims = [
        [method.label, *(text or NOTHING for aspect in aspects for text in table_one.against_paper(method, aspect))]
        for method in group.methods
    ]
    parts = ["", "### Cost and gradient variance", "", *bullets(table_one.findings(group)), ""]
    parts += [*as_table(["Method", *headings], claims), ""]
    if numbers:
        rows = [[method.label, *(column.cell(method).text for column in numbers)] for method in group.methods]
        parts += [*as_table(["Method", *(column.heading for column in numbers)], rows), ""]
    return [*parts, escaped(table_one.READING)]


def _numbers(group: Group, method: Method) -> dict[str, object]:
    row: dict[str, object] = {"group": group.name, "method": method.method, "label": method.label, "seeds": len(method.seeds)}
    row["teacher"] = group.teacher
    row |= estimated("final", method.final) | estimated("area", method.area)
    for held in method.held:
        percent = f"{100 * held.fraction:.0f}"
        row[f"held_{percent}"] = held.held if held.defined else None
        for name, spent in (("epochs", held.epochs), ("seconds", held.seconds), ("flops", held.flops)):
            row |= _spent(f"{name}_to_{percent}", spent)
    for name, found in (
        ("seconds_per_step", method.step_seconds),
        ("flops_per_step", method.step_flops),
        ("seconds", method.seconds),
        ("flops", method.flops),
        ("peak_memory", method.peak_memory),
    ):
        row |= estimated(name, found)
    row |= _table_one_numbers(method.table_one)
    for measure in findings.MEASURE_NAMES:
        found_one = next((c for c in group.comparisons if c.measure == measure and c.method == method.method), None)
        difference = found_one and found_one.difference
        row[f"{measure}_reference"] = found_one and found_one.reference
        row[f"{measure}_difference"] = difference and difference.mean
        row[f"{measure}_difference_half"] = difference and difference.half
        row[f"{measure}_p"] = difference and difference.p
        row[f"{measure}_p_exact"] = difference and difference.exact
        row[f"{measure}_p_holm"] = found_one and found_one.holm
    return row


def _table_one_numbers(row: TableOne) -> dict[str, object]:
    found = estimated("gate_fraction", row.gate_fraction) | {"gate_variance_exactly_zero": int(row.exactly_zero)}
    found |= estimated("gradient_variance", row.variance)
    found |= estimated("gate_variance_to_prediction", row.to_prediction)
    for name, counts in row.counted.items():
        found |= estimated(name, counts)
    return found | {"feature_matching": row.matching}


def estimated(name: str, found: Estimate | None) -> dict[str, object]:
    """Return an estimate as three columns of a CSV file."""
    return {f"{name}_mean": found and found.mean, f"{name}_half": found and found.half, f"{name}_n": found.n if found else 0}


def _spent(name: str, found: TimeTo | None) -> dict[str, object]:
    return {
        f"{name}_median": found and found.median,
        f"{name}_restricted_mean": found and found.restricted_mean,
        f"{name}_limit": found and found.limit,
    }


def _scored(found: Estimate | None, score_format: ScoreFormat) -> Cell:
    return Cell(score_format.estimate(found) + seeds_behind(found), None if found is None else found.mean)


def _plain(found: Estimate | None, write: Callable[[float | None], str]) -> Cell:
    return Cell(NOTHING) if found is None else Cell(write(found.mean), found.mean)


def _with_interval(found: Estimate | None, write: Callable[[float], str]) -> Cell:
    if found is None:
        return Cell(NOTHING)
    spread = found.half is not None and found.half > ROUNDING * abs(found.mean) and write(found.half) != write(0.0)
    interval = f" ± {write(found.half)}" if spread and found.half is not None else ""
    return Cell(write(found.mean) + interval + seeds_behind(found), found.mean)


def _ratio(value: float) -> str:
    return f"{value:.3f}"


def _break_even(row: TableOne) -> Cell:
    found, added = row.counted["break_even"], row.counted["of_a_full_teacher"]
    never = found is None and added is not None and added.mean == 0
    return Cell("none") if never else _with_interval(found, significant)


def _until(index: int, read: Callable[[Held], TimeTo | None], write: Callable[[float], str]) -> Callable[[Method], Cell]:
    def cell(method: Method) -> Cell:
        held = method.held[index]
        found = read(held)
        if not held.defined:
            return Cell(NOTHING)
        lost = held.seeds - held.held
        missing = "not reached" + (f" ({lost} of {held.seeds})" if held.held else "")
        if found is None or found.median is None:
            return Cell(missing)
        return Cell(write(found.median) + (f"; {missing}" if lost else ""), found.median)

    return cell


def _wins(summary: Summary) -> list[str]:
    rows = []
    for name, label in summary.methods:
        cells = []
        for group in summary.groups:
            method = group.method(name)
            mark = MARKS[method.standing["final"]] if method else ""
            text = _scored(method.final, summary.score_format).text if method else NOTHING
            cells.append(f"{text} ({mark})" if mark else text)
        rows.append([label, *cells, *([rank_text(summary, name)] if summary.ranks else [])])
    return as_table(["Method", *(group.name for group in summary.groups), *(["Average rank"] if summary.ranks else [])], rows)


def rank_text(summary: Summary, method: str) -> str:
    """Format the average rank of a method; a dash where it has none."""
    found = summary.ranks.average.get(method) if summary.ranks else None
    return NOTHING if found is None else f"{found:.2f}"


def reading(summary: Summary) -> str:
    """Say how the comparisons of methods are made."""
    family = counted(summary.comparisons, "comparison")
    reference = (
        "The reference is the best other method of the group: of those that are not Segue's own, the one with the best mean. "
        f"The same scores choose it and test it, so p-values are adjusted by Holm's method for the {family} of a measure with "
        "any of them, over all groups."
        if summary.reference is None
        else f"The reference is named beforehand; p-values are adjusted by Holm's method over the {family} of a measure."
    )
    return (
        "Differences are paired by seed: the same seed trains on the same batches. p is by Student's t; the exact p flips "
        "signs, assumes no normal distribution, and cannot be below 2 / 2^pairs (0.06 with five). Intervals are those of one "
        "comparison. "
        f"{reference} With fewer than {FEWEST} common seeds, or equal differences, nothing is called significant."
    )


def hint(groups: Sequence[Group]) -> str:
    """Say how the table of these groups is read: intervals and medians where a method has two seeds."""
    reached = "A percentage of the teacher's score is reached at the first evaluation from which the students alone keep it "
    reached += "to the end"
    if all(group.one_seed for group in groups):
        return f"{reached}."
    return (
        f"± is the half width of a 95 % interval over seeds (Student's t). {reached}: the median over seeds (Kaplan and "
        "Meier), where seeds that do not reach it count as censored at their end."
    )


def _legend(summary: Summary) -> str:
    return f"{hint(summary.groups)} {reading(summary)}"


def as_csv(rows: list[dict[str, object]]) -> str:
    """Write rows that have the same columns as CSV; a spreadsheet takes none of their texts for a formula."""
    text = io.StringIO()
    writer = csv_writer.writer(text, lineterminator="\n")
    names = list(rows[0]) if rows else ["group", "method"]
    lines: list[list[object]] = [[*names], *([row.get(name) for name in names] for row in rows)]
    for line in lines:
        writer.writerow([f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell for cell in line])
    return text.getvalue()


def as_table(headings: list[str], rows: list[list[str]]) -> list[str]:
    """Write a Markdown table, whatever its cells contain."""
    written = [headings, ["---"] * len(headings), *rows]
    return [f"| {' | '.join(cell if cell == '---' else escaped(cell) for cell in row)} |" for row in written]


def bullets(lines: list[str]) -> list[str]:
    """Write a Markdown list."""
    return [f"- {escaped(line)}" for line in lines]


def escaped(text: str) -> str:
    """Escape text for a cell or a line of Markdown."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("`", "\\`")
    return text.replace("&", "&amp;").replace("<", "&lt;")
