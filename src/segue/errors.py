"""The errors: what was asked, what was found, what to do."""


class SegueError(Exception):
    """Root of every error that Segue raises on purpose.

    The text has three lines: what was asked, what was found, and a hint.
    """

    def __init__(self, asked: str, found: str, hint: str) -> None:
        super().__init__(f"{asked}\n  {found}\n  Hint: {hint}")


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


class MissingExtraError(SegueError, ImportError):
    """An optional package is not installed."""


class SegueWarning(UserWarning):
    """Something works, but probably not as the user wants."""


def nearest(asked: str, names: list[str], most: int = 3) -> str:
    """Say which of `names` come nearest to `asked`."""
    from difflib import SequenceMatcher  # imported late: only errors need it

    def likeness(name: str) -> float:
        return SequenceMatcher(None, asked, name, autojunk=False).ratio()

    ranked = sorted(names, key=likeness, reverse=True)[:most]
    return f"Nearest names: {', '.join(ranked)}." if ranked else "There are no names to choose from."
