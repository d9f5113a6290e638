"""Write the results of this experiment as tables, in a clone, from its root.

python -m experiments.dit.report runs/dit    from finished runs; when all are, kept as results.csv beside this file
python -m experiments.dit.report             from results.csv
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from experiments.dit.runs import METHODS, STUDENTS, runs
from segue.reporting import records
from segue.reporting.statistics import Difference, Estimate, estimate, holm, paired_difference

Errors = dict[tuple[str, str, int], float]  # (student, method, seed) -> the mean squared error of the predicted noise
BEST = METHODS[-1].name
KEPT = Path(__file__).with_name("results.csv")
UNIT = 1e3  # tables show thousandths


def read(folder: Path) -> tuple[Errors, float]:
    """Return the held-out error of each finished run, and the teacher's."""
    found = [records.read(path) for path in sorted(folder.glob(f"*/{records.FILE}"))]
    errors = {
        (one.run_info.group, one.run_info.method, one.run_info.seed): one.train_info.final["epsilon_mse"] for one in found
    }
    return errors, found[0].train_info.teacher["epsilon_mse"]


def keep(errors: Errors, teacher: float) -> None:
    """Write the errors as results.csv."""
    with KEPT.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["student", "method", "seed", "epsilon_mse"])
        writer.writerow(["teacher", "", "", f"{teacher:.6f}"])
        writer.writerows([*key, f"{error:.6f}"] for key, error in sorted(errors.items()))


def kept() -> tuple[Errors, float]:
    """Return what results.csv says, in the form of `read`."""
    with KEPT.open(newline="") as file:
        first, *rows = csv.DictReader(file)
    errors = {(row["student"], row["method"], int(row["seed"])): float(row["epsilon_mse"]) for row in rows}
    return errors, float(first["epsilon_mse"])


def by_seed(errors: Errors, student: str, method: str) -> dict[int, float]:
    """Return the errors of one student trained by one method."""
    return {seed: error for (group, name, seed), error in errors.items() if (group, name) == (student, method)}


def differences(errors: Errors) -> dict[tuple[str, str], tuple[Difference, float | None]]:
    """Compare DCR with the other methods, paired by seed; with p-values adjusted over all comparisons."""
    found = {}
    for student in STUDENTS:
        ours = by_seed(errors, student, BEST)
        for variant in METHODS[:-1]:
            theirs = by_seed(errors, student, variant.name)
            difference = paired_difference([(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())])
            if difference is not None:
                found[student, variant.name] = difference
    tested = [key for key, one in found.items() if one.p is not None]
    adjusted = dict(zip(tested, holm([found[key].p or 0.0 for key in tested]), strict=True))
    return {key: (one, adjusted.get(key)) for key, one in found.items()}


def markdown(errors: Errors, teacher: float) -> str:
    """Write both tables."""
    lines = [f"Teacher: {UNIT * teacher:.1f}", "", "| student | " + " | ".join(one.label for one in METHODS) + " |"]
    lines += ["|---|" + "---|" * len(METHODS)]
    for student in STUDENTS:
        cells = [_estimate(estimate(list(by_seed(errors, student, one.name).values()))) for one in METHODS]
        lines.append(f"| {student} | " + " | ".join(cells) + " |")
    lines += ["", f"| {METHODS[-1].label} minus | " + " | ".join(one.label for one in METHODS[:-1]) + " |"]
    lines += ["|---|" + "---|" * (len(METHODS) - 1)]
    compared = differences(errors)
    for student in STUDENTS:
        cells = [_difference(*compared.get((student, one.name), (None, None))) for one in METHODS[:-1]]
        lines.append(f"| {student} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _estimate(found: Estimate | None) -> str:
    if found is None:
        return "not run"
    half = "" if found.half is None else f" ± {UNIT * found.half:.1f}"
    return f"{UNIT * found.mean:.1f}{half} (n = {found.n})"


def _difference(found: Difference | None, adjusted: float | None) -> str:
    if found is None:
        return "not run"
    half = "" if found.half is None else f" ± {UNIT * found.half:.1f}"
    p = "" if adjusted is None else f", p = {adjusted:.2g}"
    return f"{UNIT * found.mean:+.1f}{half}{p}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="Folder of finished runs; without it, results.csv is read.")
    folder = parser.parse_args().folder
    errors, teacher = kept() if folder is None else read(folder)
    if folder is not None and len(errors) == len(runs()):  # a trial with fewer runs is only shown
        keep(errors, teacher)
    print(markdown(errors, teacher))


if __name__ == "__main__":
    main()
