"""The command, called in this process."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from segue.cli import commands

runner = CliRunner()


def call(*arguments: Any) -> str:
    """Call a command in this process and return what it printed; errors come through."""
    result = runner.invoke(commands.app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output
