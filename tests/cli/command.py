"""The command, called in this process or as a shell does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from segue.cli import commands

runner = CliRunner()


def call(*arguments: str) -> str:
    """Call a command in this process and return what it printed."""
    result = runner.invoke(commands.app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Call the command as a shell does."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}
    process = [sys.executable, "-m", "segue", *arguments]
    return subprocess.run(process, capture_output=True, text=True, env=environment, cwd=cwd)
