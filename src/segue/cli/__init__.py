"""The `segue` command: its entry point and its exit codes."""

from __future__ import annotations

import signal
import sys

from segue.errors import SegueError


def main() -> None:
    """Run the command; an error prints its three lines and exits with 1, Ctrl-C with 130."""
    try:
        from segue.cli import commands
    except ImportError as error:
        _refuse_missing(error)
        raise
    try:
        commands.app(prog_name="segue")
    except ModuleNotFoundError as error:
        _refuse_missing(error)
        raise
    except SegueError as error:
        commands.show_error(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _refuse_missing(error: ImportError) -> None:
    """Name the package of the `lab` extra that is missing."""
    if error.name is not None and error.name.split(".")[0] in ("typer", "rich", "click", "scipy", "jinja2", "filelock"):
        sys.exit(f"The segue command needs {error.name}, which is not installed: pip install 'segue[lab]'")
