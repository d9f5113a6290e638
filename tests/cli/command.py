"""The command, called in this process or as a shell does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from segue.cli import commands
from tests.helpers.processes import run_python

runner = CliRunner()


def call(*arguments: str) -> str:
    """Call a command in this process and return what it printed."""
    result = runner.invoke(commands.app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def command(*arguments: str, cwd: Path | None = None) -> Any:
    """Call the command as a shell does."""
    return run_python("-m", "segue", *arguments, check=False, env={"COLUMNS": "200", "NO_COLOR": "1"}, cwd=cwd)
