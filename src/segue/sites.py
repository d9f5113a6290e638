"""Sites: where in a model something can be replaced."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, TypeAlias

from torch import nn

from segue.border import Count, Rule, checked
from segue.display import Shown, Table
from segue.errors import SiteError, nearest

__all__ = ["Pattern", "Selector", "Site", "Span", "select"]


def __dir__() -> list[str]:
    return sorted(__all__)


MOST_ALTERNATIVES = 10_000


@checked
@dataclass(frozen=True)
class Span:
    """Select consecutive layers of a list, so that each group of them is one site: k layers by one.

    >>> model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    >>> [site.members for site in select(nn.ModuleDict({"layers": model}), Span("layers", every=2))]
    [('layers.0', 'layers.1'), ('layers.2', 'layers.3')]
    """

    layers: str  # the name of an nn.ModuleList or nn.Sequential, or the end of the name if it is unique
    every: int = 2
    first: Count = 0
    last: Count | None = None  # the last layer of the last group, included


Pattern: TypeAlias = str | type[nn.Module] | Callable[[str, nn.Module], bool] | Span
SELECTOR = "a glob such as 'blocks.*.attn', a module type, a function (name, module) -> bool, a Span, or a list of these"
Selector: TypeAlias = Annotated[
    Pattern | Sequence[Pattern],
    Rule("a selector of sites", lambda value: not _has_module(value), hint=f"give {SELECTOR}."),
]


@checked
@dataclass(frozen=True)
class Site:
    """A place in the model, known by its dotted name."""

    name: str
    aliases: tuple[str, ...] = ()  # the other names of a shared module
    members: tuple[str, ...] = ()  # the modules it covers: one, or more for a span
    depth: int = 0  # the first number in its name (7 for `blocks.7.attn`), else its index
    index: int = 0  # its position among the chosen sites, in the order of the model
    count: int = 1  # the number of chosen sites
    start: int = 0  # of a span, the position of its first layer in their list

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def is_span(self) -> bool:
        return len(self.members) > 1

    @property
    def pattern(self) -> str | Span:
        """What selects this site and no other."""
        if not self.is_span:
            return self.name
        layers, size = self.name.rpartition(".")[0], len(self.members)
        return Span(layers, every=size, first=self.start, last=self.start + size - 1)


class Sites(Shown, list[Site]):
    """A list of sites that a notebook shows as a table."""

    def __repr__(self) -> str:
        return self._table().text()

    def _table(self) -> Table:
        headings = ("site", "also known as", "layers", "depth")
        rows = [(site.name, ", ".join(site.aliases), str(len(site.members) or 1), str(site.depth)) for site in self]
        return Table(f"{len(self)} site{'s' * (len(self) != 1)}", headings, rows)


@checked
def select(model: nn.Module, sites: Selector) -> list[Site]:
    """Find the sites that a selector names, in the order of the model.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> [site.name for site in select(model, "{0,2}")]
    ['0', '2']

    Args:
        model: The model to look in.
        sites: A glob (`*` is one name segment, `**` any number, `{0,2}` alternatives, `{4..11}` a range), a regular expression
            after `re:`, a module type, a function of name and module, a `Span` of layers, or a sequence of these.
    """
    named = dict(model.named_modules(remove_duplicate=False))
    named.pop("", None)
    names_of: dict[int, list[str]] = {}
    for name, module in named.items():
        names_of.setdefault(id(module), []).append(name)

    chosen: set[int] = set()
    spans: dict[str, tuple[str, ...]] = {}  # their members, by the first of them
    starts: dict[str, int] = {}
    patterns = list(sites) if isinstance(sites, Sequence) and not isinstance(sites, str) else [sites]
    if not patterns:
        raise SiteError(
            "the list of sites is empty.", f"{type(model).__name__} has {len(named)} modules.", "name at least one pattern."
        )
    for pattern in patterns:
        if isinstance(pattern, Span):
            groups = _groups(pattern, model, named)
            spans |= {group[0]: group for _, group in groups}
            starts |= {group[0]: start for start, group in groups}
            chosen |= {id(named[group[0]]) for _, group in groups}
            continue
        matches = _matcher(pattern)
        hits = {id(module) for name, module in named.items() if _decided(matches(name, module), name)}
        if not hits:
            raise _nothing_matched(pattern, model, named)
        chosen |= hits

    found = [names for module, names in names_of.items() if module in chosen]
    members = [spans.get(names[0], (names[0],)) for names in found]
    covered = [[*names, *group[1:]] for names, group in zip(found, members, strict=True)]
    _refuse_seams(covered, model)
    _refuse_nesting(covered)
    result = [
        Site(names[0], tuple(names[1:]), group, _depth(names[0], i), i, start=starts.get(names[0], 0))
        for i, (names, group) in enumerate(zip(found, members, strict=True))
    ]
    return Sites(replace(site, count=len(result)) for site in result)


def _has_module(value: object) -> bool:
    """Tell whether a user gives modules themselves, which are callable, but no functions (name, module) -> bool."""
    return any(isinstance(one, nn.Module) for one in (value if isinstance(value, list | tuple) else (value,)))


def _decided(answer: object, name: str) -> bool:
    """Read what a user's selector returns for a module as yes or no."""
    try:
        return bool(answer)
    except (RuntimeError, ValueError):  # a tensor or an array of several values
        raise SiteError(
            f"a selector must return True or False, got a {type(answer).__name__}.",
            f"It is asked for {name!r}.",
            "return a bool. Nothing was changed.",
        ) from None


def _groups(span: Span, model: nn.Module, named: dict[str, nn.Module]) -> list[tuple[int, tuple[str, ...]]]:
    """Divide the layers that a span selects into groups, each with the position of its first layer."""
    lists = {name: module for name, module in named.items() if isinstance(module, nn.ModuleList | nn.Sequential)}
    places = [name for name in lists if name == span.layers] or [name for name in lists if name.endswith(f".{span.layers}")]
    if len(places) != 1:
        found = f"They are {', '.join(places)}." if places else nearest(span.layers, list(lists))
        raise SiteError(
            f"{span} matches {len(places)} lists of layers in {type(model).__name__}.",
            found,
            "name one list. Nothing was changed.",
        )
    layers = list(lists[places[0]]._modules.items())  # named_children() would hide the second name of a shared layer
    last = len(layers) - 1 if span.last is None else span.last
    meant = layers[span.first : last + 1]
    if span.every < 2 or not 0 <= span.first <= last < len(layers) or len(meant) % span.every:
        raise SiteError(
            f"{span} does not divide the layers of {places[0]!r} into groups of at least 2.",
            f"The list has {len(layers)} layers, of which it selects {len(meant)}.",
            "choose first, last (included) and every so that all groups have the same size. Nothing was changed.",
        )
    if len({id(layer) for _, layer in meant}) < len(meant):
        raise SiteError(
            f"{span} selects a shared layer of {places[0]!r}.",
            "One module has several names there.",
            "a shared layer is one site and cannot be grouped: name it by a glob. Nothing was changed.",
        )
    uncalled = next((name for name, layer in meant if isinstance(layer, nn.ModuleList | nn.ModuleDict)), None)
    if uncalled is not None:
        kind = type(named[f"{places[0]}.{uncalled}"]).__name__
        raise SiteError(
            f"{span} selects layers of {places[0]!r} that the model never calls.",
            f"'{places[0]}.{uncalled}' is an nn.{kind}: the code around it calls its parts, and joins what they return.",
            f"choose the parts as sites ('{places[0]}.*.0'), or write a layer as one module. Nothing was changed.",
        )
    names = [f"{places[0]}.{name}" for name, _ in meant]
    return [(span.first + i, tuple(names[i : i + span.every])) for i in range(0, len(names), span.every)]


def is_seam(module: nn.Module) -> bool:
    """Tell a seam from other modules without importing its class: the core imports this module."""
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
                f"{pattern!r} is not a regular expression.", f"Python says: {error}.", "correct the expression after 're:'."
            ) from None
        return lambda name, _: expression.fullmatch(name) is not None
    if isinstance(pattern, str):
        globs = [glob.split(".") for glob in _alternatives(pattern)]
        return lambda name, _: any(_glob_matches(glob, name.split(".")) for glob in globs)
    if isinstance(pattern, type) and issubclass(pattern, nn.Module):
        kind = pattern
        return lambda _, module: isinstance(module, kind)
    assert not isinstance(pattern, type | Span)
    return pattern


def _alternatives(pattern: str) -> Iterator[str]:
    """Expand `{0,2}` and `{4..11}`, also nested, into plain globs."""
    pending, made = [pattern], 0
    while pending:
        glob = pending.pop()
        brace = re.search(r"\{([^{}]*)\}", glob)
        if brace is None:
            if "{" in glob or "}" in glob:
                raise SiteError(
                    f"pattern {pattern!r} has an unmatched brace.",
                    f"It is in {glob!r}.",
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
                "No model has that many modules.",
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


def _nothing_matched(pattern: Pattern, model: nn.Module, named: dict[str, nn.Module]) -> SiteError:
    if isinstance(pattern, str):
        what, near = f"pattern {pattern!r}", nearest(pattern.strip("*."), list(named))
    elif isinstance(pattern, type):
        kinds = sorted({type(module).__name__ for module in named.values()})
        what, near = f"type {pattern.__name__}", nearest(pattern.__name__, kinds).replace("names", "types")
    else:
        what, near = f"selector {pattern!r}", f"The first names: {', '.join(list(named)[:3])}."
    return SiteError(
        f"{what} matched 0 of {len(named)} modules of {type(model).__name__}.",
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
                    f"{name!r} is at or inside a seam.",
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
                    f"{name!r} and {outer!r} are both selected, and one is inside the other.",
                    f"{len(found)} modules match in all.",
                    "narrow the pattern so that each part of the model is replaced once. Nothing was changed.",
                )
