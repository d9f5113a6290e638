"""Sites: where in a model something can be replaced."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from segue.errors import SiteError, nearest

Pattern: TypeAlias = "str | type[nn.Module] | Callable[[str, nn.Module], bool]"
Selector: TypeAlias = "Pattern | Sequence[Pattern]"

MOST_ALTERNATIVES = 10_000


@dataclass(frozen=True)
class Site:
    """A place in the model, known by its dotted name."""

    name: str
    aliases: tuple[str, ...] = ()  # the other names of a shared module
    members: tuple[str, ...] = ()  # the modules it covers: one, or more for a span
    depth: int = 0  # the first number in its name (`blocks.7.attn` is at 7), else its index
    index: int = 0  # its position among the chosen sites, in the order of the model
    count: int = 1  # how many sites were chosen

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def select(model: nn.Module, sites: Selector) -> list[Site]:
    """Find the sites that a selector names, in the order of the model.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> [site.name for site in select(model, "{0,2}")]
    ['0', '2']

    A selector is a glob (`*` is one name segment, `**` any number, `{0,2}` alternatives, `{4..11}` a range), a regular
    expression after `re:`, a module type, a function of name and module, or a sequence of these.
    """
    named = dict(model.named_modules(remove_duplicate=False))
    named.pop("", None)
    names_of: dict[int, list[str]] = {}
    for name, module in named.items():
        names_of.setdefault(id(module), []).append(name)

    chosen: set[int] = set()
    patterns = list(sites) if isinstance(sites, Sequence) and not isinstance(sites, str) else [sites]
    if not patterns:
        raise SiteError("an empty list of sites was given.", _size(model, named), "name at least one pattern.")
    for pattern in patterns:
        matches = _matcher(pattern)
        hits = {id(module) for name, module in named.items() if matches(name, module)}
        if not hits:
            raise _nothing_matched(pattern, model, named)
        chosen |= hits

    found = [names for module, names in names_of.items() if module in chosen]
    _refuse_seams(found, model)
    _refuse_nesting(found)
    result = [Site(names[0], tuple(names[1:]), (names[0],), _depth(names[0], i), i) for i, names in enumerate(found)]
    return [replace(site, count=len(result)) for site in result]


def is_seam(module: nn.Module) -> bool:
    """Tell a seam from other modules without importing it (arrows point one way)."""
    return getattr(type(module), "is_segue_seam", False) is True


def name_matches(pattern: str, name: str) -> bool:
    """Tell whether a glob or a `re:` expression matches a dotted name."""
    return _matcher(pattern)(name, nn.Identity())


def _matcher(pattern: Pattern) -> Callable[[str, nn.Module], bool]:
    if isinstance(pattern, str) and pattern.startswith("re:"):
        try:
            expression = re.compile(pattern[3:])
        except re.error as error:
            raise SiteError(
                f"{pattern!r} is not a regular expression.", f"Python says: {error}.", "mend the expression after 're:'."
            ) from None
        return lambda name, _: expression.fullmatch(name) is not None
    if isinstance(pattern, str):
        globs = [glob.split(".") for glob in _alternatives(pattern)]
        return lambda name, _: any(_glob_matches(glob, name.split(".")) for glob in globs)
    if isinstance(pattern, type) and issubclass(pattern, nn.Module):
        kind = pattern
        return lambda _, module: isinstance(module, kind)
    if callable(pattern) and not isinstance(pattern, type):
        return pattern
    raise SiteError(
        f"{pattern!r} is not a selector of sites.",
        f"It is of type {type(pattern).__name__}.",
        "give a glob such as 'blocks.*.attn', a module type, a function (name, module) -> bool, or a list of these.",
    )


def _alternatives(pattern: str) -> Iterator[str]:
    """Expand `{0,2}` and `{4..11}`, also nested, into plain globs."""
    pending, made = [pattern], 0
    while pending:
        glob = pending.pop()
        brace = re.search(r"\{([^{}]*)\}", glob)
        if brace is None:
            if "{" in glob or "}" in glob:
                raise SiteError(
                    f"pattern {pattern!r} has a brace without its partner.",
                    f"What was left to read: {glob!r}.",
                    "write {0,2} for alternatives and {4..11} for a range.",
                )
            yield glob
            continue
        span = re.fullmatch(r"(\d+)\.\.(\d+)", brace[1])
        options: Sequence[str] = brace[1].split(",")
        if span:
            first, last = int(span[1]), int(span[2])
            options = [str(n) for n in range(first, min(last, first + MOST_ALTERNATIVES) + 1)]
        made += len(options)
        if made > MOST_ALTERNATIVES:
            raise SiteError(
                f"pattern {pattern!r} stands for more than {MOST_ALTERNATIVES} names.",
                "No model has that many places.",
                "use '*' instead of a wide range.",
            )
        pending += [glob[: brace.start()] + option.strip() + glob[brace.end() :] for option in reversed(options)]


def _glob_matches(glob: list[str], name: list[str]) -> bool:
    if not glob:
        return not name
    if glob[0] == "**":
        return any(_glob_matches(glob[1:], name[skip:]) for skip in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], glob[0]) and _glob_matches(glob[1:], name[1:])


def _depth(name: str, index: int) -> int:
    number = next((part for part in name.split(".") if part.isdigit()), None)
    return index if number is None else int(number)


def _size(model: nn.Module, named: dict[str, nn.Module]) -> str:
    return f"{type(model).__name__} has {len(named)} modules."


def _nothing_matched(pattern: Pattern, model: nn.Module, named: dict[str, nn.Module]) -> SiteError:
    if isinstance(pattern, str):
        asked, near = f"pattern {pattern!r}", nearest(pattern, list(named))
    elif isinstance(pattern, type):
        kinds = sorted({type(module).__name__ for module in named.values()})
        asked, near = f"type {pattern.__name__}", nearest(pattern.__name__, kinds).replace("names", "types")
    else:
        asked, near = f"selector {pattern!r}", f"The first names: {', '.join(list(named)[:3])}."
    return SiteError(
        f"{asked} matched 0 of {len(named)} modules of {type(model).__name__}.",
        near,
        "'*' stands for one name segment, '**' for any number. Nothing was changed.",
    )


def _refuse_seams(found: list[list[str]], model: nn.Module) -> None:
    seams = [name for name, module in model.named_modules() if is_seam(module)]
    for names in found:
        for name in names:
            seam = next((seam for seam in seams if name == seam or name.startswith(f"{seam}.")), None)
            if seam is not None:
                raise SiteError(
                    f"{name!r} lies at or inside a seam.",
                    f"A handover is already running at {seam!r}.",
                    "finish it with finalize_() or undo it with cancel_() first. Nothing was changed.",
                )


def _refuse_nesting(found: list[list[str]]) -> None:
    owner = {name: names[0] for names in found for name in names}
    for name in owner:
        parts = name.split(".")
        for cut in range(1, len(parts)):
            outer = ".".join(parts[:cut])
            if outer in owner:
                raise SiteError(
                    f"{name!r} and {outer!r} were both selected, and one lies inside the other.",
                    f"{len(found)} modules matched in all.",
                    "narrow the pattern so that each part of the model is replaced once. Nothing was changed.",
                )
