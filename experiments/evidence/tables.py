"""Tables of the committed results, or of running grids: work to 95 and 99 % of the teacher, final score, area, mechanisms.

Command:  python -m experiments.evidence.tables                       (the committed results)
          python -m experiments.evidence.tables runs/evidence/digits    (a folder of runs, also while they are made)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from experiments.evidence.arms import OURS
from experiments.evidence.judges import Evidence, Place, earlier_than_all_published, places_of
from experiments.evidence.measures import COSINES, DRIFT, FINAL, GATES, GRADIENT, Measure, Runs, area_over_flops, work
from segue.lab.report.tables import as_table
from segue.reporting import records
from segue.reporting.formatting import NOTHING, duration, flops
from segue.reporting.records import Result
from segue.reporting.statistics import estimate, time_to

MECHANISMS = (*COSINES, GRADIENT, DRIFT, GATES)


def markdown(places: list[Place]) -> str:
    """Write two tables for each place, and one that compares our recipe with the best published arm."""
    lines: list[str] = []
    for place in places:
        until = min(run.train_info.points[-1].flops for runs in place.arms.values() for run in runs.values())
        lines += [f"## {place.name}", "", f"Teacher {_text(place.teacher, FINAL)}; area over the first {flops(until)}.", ""]
        lines += as_table(
            ["arm", "seeds", "until 95 %", "until 99 %", "final", "area over operations", "operations", "time to 95 %, alone"],
            [_row(name, runs, until) for name, runs in place.arms.items()],
        )
        lines += ["", *as_table(["arm", *(one.name for one in MECHANISMS)], _mechanisms(place)), ""]
    compared = earlier_than_all_published(OURS)(Evidence(tuple(places)))
    rows = [[one.place, str(one.seeds), one.outcome, one.text.replace("`", "")] for one in compared]
    return "\n".join([*lines, *as_table(["place", "seeds", "half of the work", "measured"], rows), ""])


def _row(name: str, runs: Runs, until: float) -> list[str]:
    found = list(runs.values())
    alone = [run for run in found if run.run_info.config.get("alone")]
    return [
        name,
        str(len(found)),
        *(_until(found, fraction, flops) for fraction in (0.95, 0.99)),
        _mean([FINAL.read(run) for run in found], FINAL),
        _mean([area_over_flops(run, until) for run in found], FINAL),
        flops(sum(run.train_info.flops for run in found) / len(found)),
        _until(alone, 0.95, duration, "seconds") if alone else NOTHING,
    ]


def _until(runs: list[Result], fraction: float, write: Callable[[float], str], axis: str = "flops") -> str:
    """Return the median by Kaplan and Meier, and in how many runs the fraction is not reached."""
    spent = [work(run, fraction, axis) for run in runs]
    found = time_to([one.spent for one in spent], [one.reached for one in spent])
    missing = found.runs - found.reached
    text = "not reached" if found.median is None else write(found.median)
    return f"{text} ({missing} of {found.runs} never)" if missing and found.reached else text


def _mechanisms(place: Place) -> list[list[str]]:
    return [
        [name, *(_mean([measure.read(run) for run in runs.values()], measure) for measure in MECHANISMS)]
        for name, runs in place.arms.items()
    ]


def _mean(values: list[float | None], measure: Measure) -> str:
    found = estimate(values)
    if found is None:
        return NOTHING
    return _text(found.mean, measure) + ("" if found.half is None else f" ± {_text(found.half, measure)}")


def _text(value: float, measure: Measure) -> str:
    return f"{100 * value:.1f}" if measure.percent else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="*", help="Folders of finished runs, or of packed ones.")
    folders = parser.parse_args().folder
    made = [place for folder in folders for place in places_of(folder.name, records.read_all(folder))]
    print(markdown(made or list(Evidence.read().places)))


if __name__ == "__main__":
    main()
