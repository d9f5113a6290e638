"""The errors: what is wrong, what was found, what to do."""

from __future__ import annotations

import re

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "HandoverError",
    "MissingExtraError",
    "PlanError",
    "ResultError",
    "SegueError",
    "SegueWarning",
    "SiteError",
    "StudentError",
    "TrainingError",
    "VerificationError",
]


def __dir__() -> list[str]:
    return sorted(__all__)


NEAR = 0.6  # the likeness, from 0 to 1, from which a name is offered as a correction
SHORTEST_PART = 3  # the fewest letters that are looked for inside names
FEW = 12  # so many names are listed even if none is near
# what a terminal obeys instead of showing it: control characters, changes of the direction of writing; and broken UTF-8
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class SegueError(Exception):
    """Root of every error that Segue raises on purpose: SegueError(wrong, found, hint), shown as three lines."""

    # no __init__: torch.compile can trace the raising of an exception only without one
    def __str__(self) -> str:
        return three_lines(*self.args) if len(self.args) == 3 else printable(super().__str__())


class SiteError(SegueError, LookupError):
    """A selector names no usable place in the model."""


class PlanError(SegueError, ValueError):
    """A plan, or a value computed from it, makes no sense."""


class StudentError(SegueError, ValueError):
    """A student does not fit the place of its teacher."""


class HandoverError(SegueError, RuntimeError):
    """The handover is driven in an order that cannot work."""


class VerificationError(SegueError, AssertionError):
    """`handover.verify` finds a promise that does not hold."""


class ArgumentError(SegueError, TypeError):
    """A call names an argument that does not exist."""


class CheckpointError(SegueError, OSError):
    """A checkpoint is missing, damaged, or belongs to another model."""

    def __new__(cls, wrong: str, found: str, hint: str) -> CheckpointError:
        return super().__new__(cls, three_lines(wrong, found, hint))  # three arguments mean something else to OSError

    def __init__(self, wrong: str, found: str, hint: str) -> None:
        super().__init__(three_lines(wrong, found, hint))


class TrainingError(SegueError, ArithmeticError):
    """Training meets values it cannot continue with."""


class DataError(SegueError, ValueError):
    """Data is missing, damaged, or not what its description says."""


class ConfigError(SegueError, ValueError):
    """A run, an experiment or a command names something that does not exist."""


class ResultError(SegueError, ValueError):
    """A saved result is missing or damaged."""


class MissingExtraError(SegueError, ImportError):
    """An optional package is not installed."""


class SegueWarning(UserWarning):
    """Something works, but probably not as intended."""

    def __str__(self) -> str:
        return printable(super().__str__())


def three_lines(wrong: str, found: str, hint: str) -> str:
    """Say what is wrong, what was found, and what to do; only a hint may have lines of its own, to show code."""
    wrong, found = (re.sub(r"\s*\n\s*", " ", str(part).strip()) for part in (wrong, found))
    return printable(f"{wrong}\n  {found}\n  Hint: {hint}")


def printable(text: str) -> str:
    r"""Write out what a terminal would obey: names in a model, a folder or a file may hold anything.

    >>> printable("blocks.0\x1b[2J")
    'blocks.0\\x1b[2J'
    """
    return OBEYED.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def nearest(asked: str, names: list[str], most: int = 3) -> str:
    """Name the nearest of `names`: those that begin with what was asked for, else contain it, else are spelled like it."""
    from difflib import SequenceMatcher  # imported late: only errors need it

    def likeness(name: str) -> float:
        return SequenceMatcher(None, wanted, name.lower(), autojunk=False).ratio()

    if not names:
        return "There are no names to choose from."
    wanted = asked.lower()
    found = [name for name in names if wanted and name.lower().startswith(wanted)]
    found = found or [name for name in names if len(wanted) >= SHORTEST_PART and wanted in name.lower()]
    found = found or [name for name in names if likeness(name) >= NEAR]
    if not found and len(names) > FEW:
        return f"None of the {len(names)} names is similar."
    if not found:
        return f"The only names are: {', '.join(names)}."
    return f"Nearest names: {', '.join(sorted(found, key=likeness, reverse=True)[:most])}."
