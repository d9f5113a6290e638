"""A worker of a grid: one run in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from segue.errors import SegueError
from segue.lab.grid import Experiment, run_named, stop_with_parent


def main(place: str, options: str, name: str, out: str) -> int:
    """Carry out one run and return the exit code."""
    stop_with_parent()
    try:
        run_named(Experiment(place, json.loads(options)), name, Path(out))
    except SegueError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
