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
        if error.name is None or error.name.split(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.exit(f"The segue command needs {error.name}, which is not installed: pip install 'segue[lab]'")
    try:
        commands.app(prog_name="segue")
    except SegueError as error:
        commands.show_error(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
