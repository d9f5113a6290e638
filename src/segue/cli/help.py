"""Help: the options of a command in groups, each with its text below it; examples that can be copied from a terminal."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from segue.cli.terminal import PlainConsole

Groups = dict[str, list[tuple[str, str]]]  # title -> names with their texts
WIDEST, UNKNOWN = 100, 80  # columns: a longer line is hard to read; a pipe does not say


class HelpfulCommand(TyperCommand):
    """A command whose help cuts no word, however narrow the terminal is."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the usage, the text with its examples, and the options by group."""
        groups: Groups = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                default = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(record)
        _print_help(self, ctx, groups)


class HelpfulGroup(TyperGroup):
    """The command of commands, whose help looks like that of each of them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the usage, the text, the commands in the order of a user's work, and the options."""
        commands = [(name, one) for name in self.list_commands(ctx) if (one := self.get_command(ctx, name)) is not None]
        groups: Groups = {"Commands": [(name, inspect.cleandoc(one.help or "").split("\n\n")[0]) for name, one in commands]}
        groups["Options"] = [found for one in self.get_params(ctx) if (found := one.get_help_record(ctx)) is not None]
        _print_help(self, ctx, groups)


def _print_help(command: TyperCommand | TyperGroup, ctx: Any, groups: Groups) -> None:
    console = PlainConsole()
    width = min(WIDEST, console.width if console.is_terminal else UNKNOWN)
    console.print(Text.assemble(("Usage: ", "bold"), " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])))
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        console.print("\n" + _paragraph(paragraph, width), soft_wrap=True, highlight=False)
    for group, records in groups.items():
        console.print(Text(f"\n{group}", style="bold"))
        for name, text in records:
            console.print(Text(f"  {name}", style="cyan"), soft_wrap=True)
            console.print(_wrapped(text, width, "      "), soft_wrap=True, highlight=False)


def _paragraph(text: str, width: int) -> str:
    example = re.fullmatch(r"`([^`]+)`", " ".join(text.split()))
    return example_lines(example[1], width) if example else _wrapped(text, width, "")


def _wrapped(text: str, width: int, indent: str) -> str:
    given: dict[str, Any] = {"initial_indent": indent, "subsequent_indent": indent}
    return textwrap.fill(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False, **given)


def example_lines(command: str, width: int) -> str:
    r"""Break a command before its options, in such a way that a shell takes all lines as one command.

    >>> print(example_lines("segue sites demo --first 'a b' --second 2", 24))
      segue sites demo \
        --first 'a b' \
        --second 2
    """
    lines: list[str] = []
    for part in re.split(r" (?=--|-\w )", command):
        if lines and len(lines[-1]) + 1 + len(part) + len(" \\") <= width:
            lines[-1] += f" {part}"
        else:
            lines.append(("    " if lines else "  ") + part)
    return " \\\n".join(lines)
