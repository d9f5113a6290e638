"""The errors: what was asked, what was found, what to do."""

from __future__ import annotations


class SegueError(Exception):
    """Root of every error that Segue raises on purpose: SegueError(asked, found, hint), shown as three lines."""

    # no __init__: torch.compile can trace the raising of an exception only without one
    def __str__(self) -> str:
        return three_lines(*self.args) if len(self.args) == 3 else super().__str__()


class SiteError(SegueError, LookupError):
    """A selector names no usable place in the model."""


class PlanError(SegueError, ValueError):
    """A plan, or a value computed from it, makes no sense."""


class StudentError(SegueError, ValueError):
    """A student does not fit the place of its teacher."""


class HandoverError(SegueError, RuntimeError):
    """The handover was driven in an order that cannot work."""


class VerificationError(SegueError, AssertionError):
    """`handover.verify` found something that is not as it must be."""


class CheckpointError(SegueError, OSError):
    """A checkpoint is missing, damaged, or belongs to another model."""

    def __new__(cls, asked: str, found: str, hint: str) -> CheckpointError:
        return super().__new__(cls, three_lines(asked, found, hint))  # three arguments mean something else to OSError

    def __init__(self, asked: str, found: str, hint: str) -> None:
        super().__init__(three_lines(asked, found, hint))


class TrainingError(SegueError, ArithmeticError):
    """Training met numbers it cannot go on with."""


class DataError(SegueError, ValueError):
    """Data is missing, damaged, or not what it was said to be."""


class ConfigError(SegueError, ValueError):
    """A run, an experiment or a command names something that does not exist."""


class ResultError(SegueError, ValueError):
    """A saved result is missing or damaged."""


class MissingExtraError(SegueError, ImportError):
    """An optional package is not installed."""


class SegueWarning(UserWarning):
    """Something works, but probably not as the user wants."""


def three_lines(asked: str, found: str, hint: str) -> str:
    """Say what was asked, what was found, and what to do."""
    return f"{asked}\n  {found}\n  Hint: {hint}"


def nearest(asked: str, names: list[str], most: int = 3) -> str:
    """Say which of `names` come nearest to `asked`."""
    from difflib import SequenceMatcher  # imported late: only errors need it

    def likeness(name: str) -> float:
        return SequenceMatcher(None, asked, name, autojunk=False).ratio()

    ranked = sorted(names, key=likeness, reverse=True)[:most]
    return f"Nearest names: {', '.join(ranked)}." if ranked else "There are no names to choose from."
