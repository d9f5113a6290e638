"""Write the results of this experiment as tables, in a clone, from its root.

python -m experiments.stories15m.report runs/stories15m    from finished runs
python -m experiments.stories15m.report                    from the committed results (`segue pack` wrote them)
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from experiments.stories15m.runs import COMPARED, DCR_DFG_KL, METHODS, OPERATORS
from segue.reporting import records
from segue.reporting.formatting import flops
from segue.reporting.records import Result
from segue.reporting.statistics import estimate

KEPT = Path(__file__).with_name("results")
GOAL = 0.05  # nats of KL
HEAD = "KL, nats | same first choice | perplexity | recall | operations | tokens until KL <= 0.05"


def markdown(results: list[Result]) -> str:
    """Write a table of operators, and one of methods for each operator on which they are compared."""
    teacher = results[0].train_info.teacher
    lines = [f"Original: perplexity {math.exp(teacher['loss']):.2f}, recall {teacher['recall']:.1%}.", ""]
    lines += _table("operator", ((name, _of(results, DCR_DFG_KL.name, name)) for name in _groups(results)))
    for operator in COMPARED:
        lines += _table(f"{operator}: method", ((arm.label, _of(results, arm.name, operator)) for arm in METHODS))
    return "\n".join(lines)


def _groups(results: list[Result]) -> list[str]:
    found = {result.run_info.group for result in results}
    return [name for name in OPERATORS if name in found] + sorted(found - set(OPERATORS))


def _of(results: list[Result], method: str, group: str) -> list[Result]:
    return [one for one in results if (one.run_info.method, one.run_info.group) == (method, group)]


def _table(what: str, rows: Iterable[tuple[str, list[Result]]]) -> list[str]:
    lines = [f"| {what} | seeds | {HEAD} |", "|---|" + "---|" * (HEAD.count("|") + 2)]
    lines += [f"| {name} | {len(found)} | {' | '.join(_cells(found))} |" for name, found in rows if found]
    return [*lines, ""]


def _cells(found: list[Result]) -> list[str]:
    final = [result.train_info.final for result in found]
    steps = [next((p.step for p in result.train_info.points if p.students["kl"] <= GOAL), None) for result in found]
    tokens = [
        None if step is None else step * result.run_info.config["batch"] * 256
        for step, result in zip(steps, found, strict=True)
    ]
    reached = [count for count in tokens if count is not None]
    return [
        _mean([one["kl"] for one in final], "{:.3f}".format),
        _mean([100 * one["agreement"] for one in final], "{:.1f}".format) + " %",
        _mean([math.exp(one["loss"]) for one in final], "{:.2f}".format),
        _mean([100 * one["recall"] for one in final], "{:.1f}".format) + " %",
        flops(sum(one.train_info.flops for one in found) / len(found)),
        f"{max(reached):,}" if len(reached) == len(tokens) else f"not reached ({len(tokens) - len(reached)} of {len(tokens)})",
    ]


def _mean(values: list[float], write: Callable[[float], str]) -> str:
    found = estimate(values)
    assert found is not None
    return write(found.mean) + ("" if found.half is None else f" ± {write(found.half)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=KEPT, help="Folder of finished runs, or of packed ones.")
    print(markdown(records.read_all(parser.parse_args().folder)))


if __name__ == "__main__":
    main()
