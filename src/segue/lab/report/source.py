"""The source of a report: the runs of one grid, and what else lies in its folder.

A grid is the runs directly in a folder (packed or not) of one experiment, whose seeds have the same settings. Other runs are
strangers: they are named, and a report has them only if it is asked for all.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.border import checked
from segue.errors import ResultError
from segue.reporting import packed, records
from segue.reporting.formatting import counted, listed
from segue.reporting.records import Result

DEEPEST = 3  # folders below the grid's in which strangers are looked for
HINT = "give the folder of one grid, or --all for the runs of all folders below."


@dataclass(frozen=True, kw_only=True)
class Stranger:
    """A run that is not of the grid."""

    place: str  # below the folder of the grid
    why: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """The finished runs that a report is made from, and those that it leaves out."""

    results: list[Result]
    strangers: list[Stranger]


Found = tuple[str, Result]  # a place and the run there


@checked
def read_grid(folder: Path, *, everything: bool = False) -> Source:
    """Read the finished runs of a grid; with `everything`, all runs below its folder."""
    if everything:
        return Source(results=records.read_all(folder), strangers=[])
    found = [(path.parent.name, records.read(path)) for path in _results_in(folder)]
    if (path := folder / packed.FILE).is_file():
        found += [(f"{packed.FILE}: {result.run_info.name}", result) for result in records.read_packed(path)]
    below = _below(folder)
    if not found:
        far = [] if below else records.read_all(folder)  # which says what is missing
        where = f"Below it are {listed(below, most=5)}." if below else f"Far below it are {counted(len(far), 'run')}."
        raise ResultError(f"{folder} has no finished run of its own.", where, HINT)
    kept, strangers = _of_one_grid(found)
    strangers += [Stranger(place=place, why="in another folder") for place in below]
    return Source(results=[result for _, result in kept], strangers=strangers)


def _results_in(folder: Path) -> list[Path]:
    return [path for path in (folder / records.FILE, *sorted(folder.glob(f"*/{records.FILE}"))) if path.is_file()]


def _below(folder: Path) -> list[str]:
    """Name what has runs further below a folder."""
    depths = [(records.FILE, range(2, DEEPEST + 1)), (packed.FILE, range(1, DEEPEST))]
    paths = [path for name, levels in depths for level in levels for path in folder.glob(f"{'*/' * level}{name}")]
    return sorted(str(path.parent.relative_to(folder)) for path in paths)


def _of_one_grid(found: list[Found]) -> tuple[list[Found], list[Stranger]]:
    strangers: list[Stranger] = []

    def sort_out(runs: list[Found], key: Callable[[Result], Any], why: str) -> list[Found]:
        """Keep the runs with the most frequent value, the first of these if there are several."""
        usual = _most_frequent(key(result) for _, result in runs)
        strangers.extend(Stranger(place=place, why=why) for place, result in runs if key(result) != usual)
        return [run for run in runs if key(run[1]) == usual]

    name = _most_frequent(result.run_info.experiment for _, result in found)
    kept = sort_out(found, lambda result: result.run_info.experiment, f"of another experiment than {name!r}")
    arms: dict[tuple[str, str], list[Found]] = {}
    for run in kept:
        info = run[1].run_info
        arms.setdefault((info.group, info.method), []).append(run)
    alike = [run for runs in arms.values() for run in sort_out(runs, settings_of, "of other settings than its method's")]
    taken: set[tuple[str, str, int]] = set()
    single = []
    for place, result in alike:
        info = result.run_info
        if (key := (info.group, info.method, info.seed)) in taken:
            strangers.append(Stranger(place=place, why=f"a double of {info.method}, seed {info.seed}"))
        else:
            taken.add(key)
            single.append((place, result))
    mine = {id(result) for _, result in single}
    return [run for run in found if id(run[1]) in mine], strangers


def settings_of(result: Result) -> str:
    """Return the settings of a run, without its seeds, as text to compare."""
    return json.dumps(_without_seeds(result.run_info.config), sort_keys=True, default=str)


def _without_seeds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_seeds(item) for key, item in value.items() if key != "seed"}
    return [_without_seeds(item) for item in value] if isinstance(value, list | tuple) else value


def _most_frequent(values: Iterable[Any]) -> Any:
    counts = Counter(values)
    return max(counts, key=lambda value: counts[value], default=None)  # the first of equals


def left_out(strangers: list[Stranger], most: int = 20) -> list[str]:
    """Say which runs a report leaves out, line by line; nothing if it has all."""
    if not strangers:
        return []
    lines = [f"  {one.place} ({one.why})" for one in strangers[:most]]
    more = [f"  and {len(strangers) - most} more"] if len(strangers) > most else []
    return [f"{counted(len(strangers), 'run')} left out; --all takes them too:", *lines, *more]
