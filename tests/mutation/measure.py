"""The tests of a room, as mutants need them: which lines each runs, and how long it takes."""

from __future__ import annotations

import compileall
import hashlib
import json
import os
import shutil
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

from tests.mutation.operators import Mutant, functions_of

ROOT = Path(__file__).parents[2]
WORK = ROOT / ".mutants"
TREE = WORK / "tree"
PACKAGE = TREE / "src/segue"
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "runs", "site", "build", "dist", "*.egg-info")


def copy_tree() -> None:
    """Copy the repository: faults are planted in the copy alone."""
    shutil.rmtree(TREE, ignore_errors=True)
    shutil.copytree(ROOT, TREE, ignore=IGNORED)
    compileall.compile_dir(PACKAGE, quiet=1, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)


class Warm:
    """The process that runs tests in forks (`warm.py`)."""

    def __init__(self, loaded: list[str]) -> None:
        paths = f"{PACKAGE.parent}{os.pathsep}{TREE}"
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.mutation.warm"]
        self.process = subprocess.Popen(
            command, cwd=TREE, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ask(loaded)

    def run(self, paths: list[str], limit: float, **request: Any) -> dict[str, Any]:
        """Run tests of these files, with a limit in seconds."""
        places = {name: str(WORK / name) for name in ("temporary", "answer", "log")}
        return self._ask({"paths": paths, "limit": limit, **places, **request})  # type: ignore[no-any-return]

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _ask(self, message: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("The process that runs the tests has ended.")
        return json.loads(answer)


class RoomTests:
    """The tests of a room, measured once per file, and again when the file changes."""

    def __init__(self, name: str, folders: list[str], sources: list[str]) -> None:
        files = [path for folder in folders for path in sorted((TREE / folder).rglob("test_*.py"))]
        self.paths = [str(path.relative_to(TREE)) for path in (*files, *(PACKAGE / source for source in sources))]
        self.digests = {path: hashlib.sha256((TREE / path).read_bytes()).hexdigest() for path in self.paths}
        self.cache = WORK / f"tests-{name}.json"
        known = json.loads(self.cache.read_text()) if self.cache.exists() else {"digests": {}, "tests": {}, "loaded": []}
        self.tests: dict[str, Any] = known["tests"]
        self.loaded: list[str] = known["loaded"]  # modules
        stale = [path for path in self.paths if known["digests"].get(path) != self.digests[path]]
        if stale:
            self._measure(stale)
        for test, facts in self.tests.items():
            if not facts["passed"]:
                print(f"left out, because it fails without a mutant: {test}")

    def _measure(self, paths: list[str]) -> None:
        print(f"measuring the tests of {len(paths)} files", flush=True)
        warm = Warm(self.loaded)
        answer = warm.run(paths, limit=3600, collect=str(WORK / "measured"))
        warm.end()
        if answer["code"] not in (0, 1, 5):  # passed, some failed, none found
            raise SystemExit(f"The tests cannot be measured; see {WORK / 'log'}.")
        measured = json.loads((WORK / "measured").read_text())
        for facts in measured["tests"].values():
            facts["lines"] = {source: _by_function(source, lines) for source, lines in facts["lines"].items()}
        kept = set(self.paths) - set(paths)
        self.tests = {test: facts for test, facts in self.tests.items() if test.partition("::")[0] in kept} | measured["tests"]
        self.loaded = list(dict.fromkeys([*self.loaded, *measured["loaded"]]))
        self.cache.write_text(json.dumps({"digests": self.digests, "tests": self.tests, "loaded": self.loaded}))

    def of(self, mutant: Mutant, budget: float) -> dict[str, float]:
        """Return the tests that reach a mutant and their seconds, then those of which that is not known.

        The tests of its own file come first, then the fastest.
        With a budget the sum of their seconds stays within it, and only tests that are known to reach the mutant are run.
        """
        reaching, unknown = {}, {}
        for test, facts in self.tests.items():
            functions = facts["lines"].get(mutant.file, {})
            if not facts["passed"]:
                continue
            if _reaches(functions, mutant):
                reaching[test] = facts["seconds"]
            elif "processes" in facts["marks"] or (functions and "slow" in facts["marks"]):  # they compile, or run elsewhere
                unknown[test] = facts["seconds"]
        own = f"/test_{Path(mutant.file).stem}.py::"
        fastest = [sorted(tests.items(), key=lambda test: (own not in test[0], test[1])) for tests in (reaching, unknown)]
        if budget == float("inf"):
            return dict(fastest[0] + fastest[1])
        spent = accumulate(seconds for _, seconds in fastest[0])
        return {test: seconds for (test, seconds), sum_ in zip(fastest[0], spent, strict=True) if sum_ <= budget}


def _by_function(source: str, lines: list[int]) -> dict[str, Any]:
    """Count lines from the beginning of their function, so that changes elsewhere in the file do not move them."""
    found = {}
    for scope in functions_of((PACKAGE / source).read_text(encoding="utf-8")):
        inside = [line - scope.first for line in lines if scope.first <= line <= scope.last]
        if inside:
            found[scope.digest] = {"name": scope.name, "lines": inside}
    return found


def _reaches(functions: dict[str, Any], mutant: Mutant) -> bool:
    if not mutant.scope.name:
        return bool(functions)  # what a module does when it is imported
    if mutant.scope.digest in functions:
        return not mutant.reached or any(line in mutant.reached for line in functions[mutant.scope.digest]["lines"])
    return any(function["name"] == mutant.scope.name for function in functions.values())
