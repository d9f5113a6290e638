"""Plant faults systematically: a seeded sample of mutants, each run against the tests of its room.

    make mutants                                              the sample, as far as it is not known
    .venv/bin/python -m tests.mutation --only core/seam.py    its part in some files
    .venv/bin/python -m tests.mutation --budget 60            a first look: the fastest tests alone

A mutant is run against the tests of its room that reach its line, those of its own file and then the fastest first, until one
fails. What was found is kept in results.jsonl by the text of the mutant and of its function: the command resumes where it was
stopped, and repeats only the mutants of functions that have changed and those that survived. Survivors that no test can find
are in equivalent.json, each with the reason. The command fails if it caught less than 95 % of the others, or if a survivor is
not listed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.mutation.measure import PACKAGE, ROOT, WORK, RoomTests, Warm, copy_tree
from tests.mutation.operators import Mutant, mutants_of
from tests.mutation.page import write_page
from tests.mutation.warm import OUT_OF_TIME

ROOMS = {  # its tests, its files
    "core": (["tests/core"], ["core/*.py"]),
    "checkpoint": (["tests/checkpoint"], ["checkpoint/*.py"]),
    "vocabulary": (["tests/vocabulary", "tests/contracts"], ["gates.py", "schedules.py", "losses.py"]),
}
RESULTS = Path(__file__).with_name("results.jsonl")
EQUIVALENT = Path(__file__).with_name("equivalent.json")
AT_LEAST = 4  # mutants of a file
ENOUGH = 0.95
PATIENCE = 20.0  # seconds that a test may take at least, and times as long as without a mutant
TIMES = 10.0


def sample(files: dict[str, list[Mutant]], count: int, seed: int) -> list[Mutant]:
    """Choose from every file in proportion. A mutant's place in the order is its own: an edit changes only what it touches."""
    total = sum(map(len, files.values()))
    chosen = []
    for mutants in files.values():
        ranked = sorted(mutants, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.key}".encode()).digest())
        chosen += ranked[: max(AT_LEAST, round(count * len(mutants) / total))]
    return chosen


class Results:
    """What is known of each mutant, one line of JSON each; the last one counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.known: dict[str, dict[str, Any]] = {record["mutant"]: record for record in map(json.loads, lines)}

    def of(self, mutant: Mutant) -> dict[str, Any] | None:
        record = self.known.get(mutant.key)
        return record if record is not None and record["function"] == mutant.scope.digest else None

    def add(self, mutant: Mutant, **found: Any) -> None:
        self.known[mutant.key] = {"mutant": mutant.key, "function": mutant.scope.digest, **found}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.known[mutant.key], ensure_ascii=False) + "\n")

    def keep(self, mutants: Iterable[Mutant]) -> None:
        """Write the file again with these mutants alone, in order."""
        records = (self.of(mutant) for mutant in mutants)
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records if record is not None]
        self.path.write_text("".join(sorted(lines)), encoding="utf-8")


def run(mutant: Mutant, room: RoomTests, warm: Warm, budget: float) -> dict[str, Any]:
    """Plant a mutant in the copy of the repository, run the tests that reach it, and take it out again."""
    tests = room.of(mutant, budget)
    if not tests:
        return {"caught": False, "by": "", "seconds": 0.0}
    limits = {test: max(PATIENCE, TIMES * seconds) for test, seconds in tests.items()}
    paths = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    place = PACKAGE / mutant.file
    original = place.read_text(encoding="utf-8")
    for compiled in (place.parent / "__pycache__").glob(f"{place.stem}.*"):
        compiled.unlink()
    place.write_text(mutant.source, encoding="utf-8")
    try:
        answer = warm.run(paths, limit=600 + TIMES * sum(tests.values()), tests=limits)
    finally:
        place.write_text(original, encoding="utf-8")
    if answer["code"] not in (0, 1, 2, OUT_OF_TIME) or (answer["code"] in (1, 2) and not answer["failed"]):
        raise SystemExit(f"The tests did not run (code {answer['code']}) for {mutant.key}; see {WORK / 'log'}.")
    by = f"time: {answer['failed']}" if answer["code"] == OUT_OF_TIME else answer["failed"]
    return {"caught": bool(by), "by": by, "seconds": answer["seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant a seeded sample of faults and run the tests against them.")
    parser.add_argument("--count", type=int, default=300, help="Number of mutants.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the sample.")
    parser.add_argument("--only", nargs="+", default=[], help="Files below src/segue.")
    parser.add_argument("--budget", type=float, default=float("inf"), help="Seconds of tests for each mutant; all by default.")
    options = parser.parse_args()

    WORK.mkdir(exist_ok=True)
    copy_tree()
    sources = {
        room: [p.relative_to(PACKAGE).as_posix() for glob in globs for p in sorted(PACKAGE.glob(glob))]
        for room, (_, globs) in ROOMS.items()
    }
    mutants = {
        file: mutants_of(file, (PACKAGE / file).read_text(encoding="utf-8")) for files in sources.values() for file in files
    }
    chosen = sample(mutants, options.count, options.seed)
    results = Results(RESULTS)
    equivalent = json.loads(EQUIVALENT.read_text(encoding="utf-8"))

    def is_known(mutant: Mutant) -> bool:
        result = results.of(mutant)
        return result is not None and (result["caught"] or mutant.key in equivalent)

    for name, (folders, _) in ROOMS.items():
        files = [file for file in sources[name] if not options.only or file in options.only]
        todo = [mutant for mutant in chosen if mutant.file in files and not is_known(mutant)]
        if not todo:
            continue
        room = RoomTests(name, folders, sources[name])
        warm = Warm(room.loaded)
        for i, mutant in enumerate(todo, 1):
            found = run(mutant, room, warm, options.budget)
            results.add(mutant, **found)
            print(
                f"{i:4}/{len(todo)} {found['seconds']:6.1f}s {found['by'] or 'SURVIVED':60.60} {mutant.line} {mutant.key}",
                flush=True,
            )
        warm.end()
    results.keep(chosen)
    raise SystemExit(summary(mutants, chosen, results, equivalent))


def summary(mutants: dict[str, list[Mutant]], chosen: list[Mutant], results: Results, equivalent: dict[str, str]) -> int:
    """Print what was caught, write the page once all is known, and return the exit code."""
    known = [(mutant, result) for mutant in chosen if (result := results.of(mutant)) is not None]
    missed = [mutant for mutant, result in known if not result["caught"] and mutant.key not in equivalent]
    same = sum(not result["caught"] for _, result in known) - len(missed)
    caught = len(known) - same - len(missed)
    left = len(chosen) - len(known)
    print(f"{caught} of {len(known)} mutants caught, {same} equivalent, {len(missed)} not caught; {left} to run")
    for mutant in missed:
        print(f"not caught, line {mutant.line}: {mutant.key}")
    if len(known) == len(chosen):
        write_page(ROOT / "docs/mutation.md", {file: len(all_) for file, all_ in mutants.items() if all_}, known, equivalent)
    return int(bool(missed) or caught < ENOUGH * (len(known) - same))


if __name__ == "__main__":
    main()
