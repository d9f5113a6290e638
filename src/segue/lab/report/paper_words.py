"""The paper's words of Table 1 beside what was measured, and whether they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from segue.lab.report.table_one import NO_MATCHING
from segue.reporting.formatting import LONGEST, NOTHING, ScoreFormat, counted, seeds_behind, shortened, significant

if TYPE_CHECKING:
    from segue.lab.report.summary import Group, Method
    from segue.lab.report.table_one import TableOne
    from segue.reporting.statistics import Estimate

LOW, HIGH = 0.1, 0.5  # of all variance; of the operations that a full teacher adds
READING = (
    f"“Low” is read as below {100 * LOW:.0f} %, “High” as above {100 * HIGH:.0f} %: of the variance of the students' "
    "gradients, and of the operations that a full teacher adds to student-only training. A word is open while the 95 % "
    "interval over seeds reaches across."
)

IN_PERCENT, AS_IT_IS = ScoreFormat(percent=True), ScoreFormat(percent=False)

Verdict = Literal["holds", "does not hold", "open", "not measured"]


@dataclass(frozen=True)
class Aspect:
    """One column of Table 1."""

    heading: str
    words: dict[str, str]  # the paper's, by method
    measured: Callable[[TableOne], str]
    verdict: Callable[[TableOne, str], Verdict]


def level(found: Estimate | None, word: str) -> Verdict:
    """Say whether a share is as low or as high as a word says, whatever the seeds."""
    if found is None:
        return "not measured"
    low, high = found.mean - (found.half or 0.0), found.mean + (found.half or 0.0)
    inside, outside = (high < LOW, low >= LOW) if word.startswith("Low") else (low > HIGH, high <= HIGH)
    return "holds" if inside else "does not hold" if outside else "open"


def gates(row: TableOne) -> str:
    """Write the share of the variance that the gates cause."""
    if row.exactly_zero:
        return "0 (exactly)" + seeds_behind(row.gate_share)
    return IN_PERCENT.estimate(row.gate_share) + seeds_behind(row.gate_share)


def compute(row: TableOne) -> str:
    """Write what the whole run costs, beside students alone and beside a full teacher."""
    found, share = row.counted["to_student_only"], row.counted["of_a_full_teacher"]
    if found is None:
        return NOTHING
    beside = "" if share is None else f", {IN_PERCENT.value(share.mean)} of what a full teacher adds"
    return f"{found.mean:.3f} x student-only{beside}{seeds_behind(found)}"


def _matched(row: TableOne, word: str) -> Verdict:
    if row.matching is None:
        return "not measured"
    return "holds" if (row.matching == NO_MATCHING) == word.startswith("No") else "does not hold"


ASPECTS = (
    Aspect(
        "Gradient variance caused by the gates",
        {"distillation": "Low", "theseus": "High (gate-induced)", "dcr": "Low (deterministic)"},
        gates,
        lambda row, word: level(row.gate_share, word),
    ),
    Aspect(
        "Extra compute of the whole run",
        {
            "distillation": "High (full teacher model forward)",
            "theseus": "Low (gate overhead only)",
            "dcr": "Low (branch-local teacher only at replaced layers)",
        },
        compute,
        lambda row, word: level(row.counted["of_a_full_teacher"], word),
    ),
    Aspect(
        "Needs feature matching",
        {"distillation": "Yes (rigid)", "theseus": "No", "dcr": "No (optional via DFG)"},
        lambda row: row.matching or NOTHING,
        _matched,
    ),
)


def beside(method: Method, aspect: Aspect) -> tuple[str, str, Verdict | None]:
    """Give what was measured, the paper's word for it and whether it holds; rows that the paper lacks have no word."""
    row, word = method.table_one, aspect.words.get(method.method, "")
    return aspect.measured(row), word, aspect.verdict(row, word) if word else None


def sentences(group: Group) -> list[str]:
    """Say of every word of the paper whether it holds, then what the formula and the counts add."""
    return [*_words(group), *_variances(group), *_break_even(group)]


def _words(group: Group) -> list[str]:
    found = []
    for aspect in ASPECTS:
        by_verdict: dict[str, list[str]] = {"holds": [], "does not hold": [], "open": []}
        for method in group.methods:
            measured, word, verdict = beside(method, aspect)
            if verdict in by_verdict:
                by_verdict[verdict].append(f"{shortened(method.label, LONGEST)} (“{word}”, here {measured})")
        parts = [f"{verdict}: {'; '.join(told)}" for verdict, told in by_verdict.items() if told]
        if parts:
            found.append(f"{aspect.heading}, the paper's word {', '.join(parts)}.")
    return found


def _variances(group: Group) -> list[str]:
    whole = [(m.label, m.table_one.variance) for m in group.methods]
    formula = [(m.label, m.table_one.to_prediction) for m in group.methods]
    said = {"The gates' variance beside the paper's formula for it": (formula, " x")}
    if any(one is not None and one.mean > 0 for _, one in formula):  # some gate is random: what is left without it?
        said["The whole variance, by gates and minibatches"] = (whole, "")
    return [
        f"{what}: {', '.join(f'{AS_IT_IS.estimate(one)}{unit} with {shortened(label, LONGEST)}' for label, one in found)}."
        for what, (numbers, unit) in said.items()
        if (found := [(label, one) for label, one in numbers if one is not None])
    ]


def _break_even(group: Group) -> list[str]:
    for method in group.methods:
        even, replaced = (method.table_one.counted[name] for name in ("break_even_blend", "replaced"))
        if even is not None and replaced is not None:
            return [
                f"A step of a blend is as dear as one with a full teacher at {significant(even.mean)} modules like these; "
                f"{counted(round(replaced.mean), 'module')} replaced here."
            ]
    return []
