"""The border: what a user gives is compared with the type hints themselves, once, before anything is done.

`@checked` on a function, a method or a class (above `@dataclass`) refuses an argument that its hint does not allow. True is
no number and "no" is no bool; numbers are finite; numbers of NumPy and torch become Python's own. `Annotated` adds a range.
A user's function is welcome where the hint is a Callable. What runs in the forward of a seam is not decorated.
"""

from __future__ import annotations

import collections.abc
import inspect
import math
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from segue.errors import (
    ArgumentError,
    CheckpointError,
    ConfigError,
    DataError,
    HandoverError,
    PlanError,
    ResultError,
    SegueError,
    SiteError,
    nearest,
)

T = TypeVar("T", bound=Callable[..., Any])
LARGEST = 10**12  # count: more steps or units than any machine has time or room for
LARGEST_FLOAT = 3.4e38  # in float32, in which models compute
LONGEST = 60  # letters of a value in an error

# The kind of error for a wrong argument, by the place of what is called; PlanError for the rest of the vocabulary.
ERRORS: dict[str, type[SegueError]] = {
    "segue.sites": SiteError,
    "segue.core.handover.Handover": HandoverError,
    "segue.checkpoint": CheckpointError,
    "segue.training": ConfigError,
    "segue.reporting": ResultError,
    "segue.integrations": HandoverError,
    "segue.data": DataError,
    "segue.convert": ConfigError,
    "segue.lab": ConfigError,
}


@dataclass(frozen=True)
class Rule:
    """What a value must be besides its type: in words, as a test, and what to do."""

    says: str
    holds: Callable[[Any], bool] = lambda _: True
    hint: str | None = None


def at_least(least: float) -> Rule:
    return Rule(f"{{a}} of at least {least}", lambda value: least <= value <= LARGEST_FLOAT)


PositiveInt: TypeAlias = Annotated[int, Rule("a positive {noun}", lambda value: 0 < value <= LARGEST)]
PositiveFloat: TypeAlias = Annotated[float, Rule("a positive {noun}", lambda value: 0 < value <= LARGEST_FLOAT)]
Count: TypeAlias = Annotated[int, Rule("{a} of at least 0", lambda value: 0 <= value <= LARGEST)]
NotNegative: TypeAlias = Annotated[float, at_least(0)]
Seed: TypeAlias = Annotated[int, Rule("an integer of 64 bits", lambda value: -(2**63) <= value < 2**63)]
Unit: TypeAlias = Annotated[float, Rule("a number from 0 to 1", lambda value: 0 <= value <= 1)]
Fraction: TypeAlias = Annotated[float, Rule("a number above 0 and at most 1", lambda value: 0 < value <= 1)]


def checked(made: T) -> T:
    """Refuse arguments that the type hints of a function or class do not allow.

    >>> @checked
    ... def add(steps: PositiveInt, to: int = 0) -> int:
    ...     return steps + to
    >>> add(0)
    Traceback (most recent call last):
    ...
    segue.errors.PlanError: add(steps=...) must be a positive integer, got 0.
      It is of type int.
      Hint: give a positive integer.
    """
    if isinstance(made, type):
        maker = "__new__" if issubclass(made, tuple) else "__init__"  # a NamedTuple has no __init__ of its own
        setattr(made, maker, _guarded(getattr(made, maker), made, made.__name__))
        return made
    return typing.cast(T, _guarded(made, made, made.__qualname__.rpartition("<locals>.")[2]))


def _guarded(function: Callable[..., Any], owner: Any, name: str) -> Callable[..., Any]:
    place = f"{owner.__module__}.{owner.__qualname__}."
    error = next((kind for start, kind in ERRORS.items() if place.startswith(f"{start}.")), PlanError)

    @cache
    def border() -> tuple[tuple[str, ...], dict[str, Any], list[str] | None]:  # late: importing Segue must not wait for it
        parameters = inspect.signature(function).parameters
        fields = is_dataclass(owner) or hasattr(owner, "_fields")
        hints = typing.get_type_hints(owner if fields else function, include_extras=True)
        named = {key: hints[key] for key, one in parameters.items() if key in hints and one.kind not in _VARIABLE}
        places = tuple(key for key, one in parameters.items() if one.kind in _BY_PLACE)
        return places, named, _keywords(parameters, hints)

    def accept(parameter: str, hint: Any, value: Any) -> Any:
        try:
            return _accept(hint, value)
        except _MismatchError as mismatch:
            default = inspect.signature(function).parameters[parameter].default
            raise _refusal(error, f"{name}({parameter}=...)", hint, value, mismatch, default) from None

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        places, hints, known = border()
        if known is not None and (foreign := [key for key in kwargs if key not in known]):
            raise _unknown(name, foreign[0], known)
        given = [accept(key, hints[key], value) if key in hints else value for key, value in zip(places, args, strict=False)]
        named = {key: accept(key, hints[key], value) if key in hints else value for key, value in kwargs.items()}
        return function(*given, *args[len(places) :], **named)  # Python names what is missing

    return guarded


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NEVER_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _keywords(parameters: Mapping[str, inspect.Parameter], hints: dict[str, Any]) -> list[str] | None:
    """Return the names that may be given by keyword, or None if any may: `**settings: Unpack[...]` lists its own."""
    known = []
    for key, one in parameters.items():
        if one.kind is inspect.Parameter.VAR_KEYWORD:
            inside = typing.get_args(hints.get(key))
            if not (inside and typing.is_typeddict(inside[0])):
                return None
            known += inside[0].__annotations__
        elif one.kind not in _NEVER_NAMED and key not in ("self", "cls", "_cls"):
            known.append(key)
    return known


def _unknown(name: str, key: str, known: list[str]) -> ArgumentError:
    near = nearest(key, known, most=1).removeprefix("Nearest names: ").removesuffix(".")
    found = nearest(key, known) if known else "It takes none by keyword."
    todo = f"write {near}= instead" if near in known else f"help({name}) describes them"
    return ArgumentError(f"{name}() has no argument {key!r}.", found, f"{todo}. Nothing was changed.")


class _MismatchError(Exception):
    """A value, or a part of it, is not what the hint says."""

    def __init__(self, part: Any, *place: str, why: str | None = None) -> None:
        self.part, self.place, self.why = part, place, why


def _accept(hint: Any, value: Any, *at: str) -> Any:
    """Return the value as the hint wants it, or raise a mismatch."""
    if type(value) is hint and hint is not float:  # the usual case, quickly
        return value
    origin, inside = _parts(hint)
    if origin is Annotated:
        value = _accept(inside[0], value, *at)
        if not all(rule.holds(value) for rule in inside[1:] if isinstance(rule, Rule)):
            raise _MismatchError(value, *at)
        return value
    if _is_union(hint):
        return value if value is None and type(None) in inside else _accept_one(inside, value, *at)
    if origin in _ITERABLES:
        return _accept_items(origin, inside, value, *at)
    if origin in (dict, collections.abc.Mapping) and isinstance(value, collections.abc.Mapping):
        for key, item in value.items():
            _accept(inside[0], key, *at, f"the key {_shown(key)}")
            _accept(inside[1], item, *at, f"the value at {_shown(key)}")
        return value
    if hint is Path and isinstance(value, str | os.PathLike):
        return Path(value)
    if origin is Literal:
        return _accept_choice(inside, value, *at)
    if hint in (int, float, bool):
        value = _plain(value)
    if hint is int and isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if hint is float and isinstance(value, Real) and not isinstance(value, bool) and _is_finite(value):
        keeps = isinstance(value, int) and abs(value) <= LARGEST  # a usual int stays one: files and hashes hold it
        return value if keeps else float(value)
    if hint is bool and isinstance(value, bool):
        return value
    if hint in (int, float, bool) or not _is_a(hint, origin, inside, value):
        raise _MismatchError(value, *at)
    if origin is collections.abc.Callable and isinstance(inside[0], list) and not _takes(value, len(inside[0])):
        raise _MismatchError(value, *at, why=f"It does not take {len(inside[0])} argument{'s' * (len(inside[0]) != 1)}.")
    return value


@cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(hint), typing.get_args(hint)


def _is_union(hint: Any) -> bool:
    return _parts(hint)[0] in (typing.Union, types.UnionType)


def _plain(value: Any) -> Any:
    """Return the number in a scalar of NumPy or a tensor without dimensions, unless a gradient would be lost."""
    is_scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "item") and not getattr(value, "requires_grad", False)
    return value.item() if is_scalar and not getattr(value, "is_meta", False) else value


def _accept_choice(choices: tuple[Any, ...], value: Any, *at: str) -> Any:
    """Return the choice that a value equals; a string may be of a class of its own, such as NumPy's or an enumeration's."""
    for choice in choices:
        same_kind = isinstance(value, str) if isinstance(choice, str) else type(value) is type(choice)
        if same_kind and value == choice:
            return choice
    raise _MismatchError(value, *at)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False


_ITERABLES = (tuple, list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)


def _accept_one(hints: tuple[Any, ...], value: Any, *at: str) -> Any:
    mismatches = []
    for hint in hints:
        try:
            return _accept(hint, value, *at)
        except _MismatchError as mismatch:
            mismatches.append(mismatch)
    raise max(mismatches, key=lambda mismatch: len(mismatch.place))


def _accept_items(origin: Any, inside: tuple[Any, ...], value: Any, *at: str) -> Any:
    """Accept lists and tuples for each other, and make a tuple of an array; leave alone what can be read only once."""
    if isinstance(value, str | bytes | collections.abc.Mapping) or not isinstance(value, collections.abc.Iterable):
        raise _MismatchError(value, *at)
    if origin is not collections.abc.Iterable and not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        raise _MismatchError(value, *at)
    if getattr(value, "ndim", 1) == 0:  # an array without dimensions has no items
        raise _MismatchError(value, *at)
    fixed = origin is tuple and inside[-1:] != (...,)
    if fixed and len(value) != len(inside):  # type: ignore[arg-type]
        raise _MismatchError(value, *at)
    if inside[:1] in ((Any,), (object,)) or not (isinstance(value, list | tuple) or origin is not collections.abc.Iterable):
        return value
    found = list(value)
    items = [_accept(inside[i] if fixed else inside[0], item, *at, f"item {i}") for i, item in enumerate(found)]
    if isinstance(value, list | tuple) and all(new is old for new, old in zip(items, found, strict=True)):
        return value
    return items if isinstance(value, list) else tuple(items)


def _is_module(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "named_modules")  # an nn.Module, without importing torch


def _takes(value: Any, count: int) -> bool:
    """Tell whether a function or module can be called with so many arguments, where that can be known."""
    if not (inspect.isfunction(value) or _is_module(value)):
        return True
    called = value.forward if _is_module(value) else value
    own = getattr(getattr(called, "__code__", None), "co_filename", None) == __file__  # a checked function
    try:  # a decorator may give arguments of its own, so that what it wraps takes more than it does
        signature = inspect.signature(called, follow_wrapped=own)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _is_a(hint: Any, origin: Any, inside: tuple[Any, ...], value: Any) -> bool:
    if hint in (Any, object) or isinstance(hint, TypeVar):
        return True
    if hint is None or hint is type(None):
        return value is None
    if origin is type:
        return isinstance(value, type) and (inside[0] is Any or issubclass(value, inside[0]))
    if origin is collections.abc.Callable or hint is collections.abc.Callable:
        makes = inside[-1] if inside else Any
        is_maker = isinstance(makes, type) and isinstance(value, type) and issubclass(value, makes)
        return callable(value) and (not isinstance(value, type) or makes is Any or is_maker)
    if getattr(hint, "_is_protocol", False):
        return not isinstance(value, type) and all(hasattr(value, name) for name in vars(hint) if not name.startswith("_"))
    kind = origin or hint
    return isinstance(value, kind) if isinstance(kind, type) else True


def _refusal(error: type[SegueError], what: str, hint: Any, value: Any, mismatch: _MismatchError, default: Any) -> SegueError:
    wanted, part = _text(hint), mismatch.part
    found = f"It is {'a class' if isinstance(part, type) else f'of type {type(part).__name__}'}."
    choices = [choice for choice in _choices(hint) if isinstance(choice, str)]
    parts = [one for one in typing.get_args(hint) if one is not type(None)] if _is_union(hint) else [hint]
    rule = _rule(parts[0]) if len(parts) == 1 else None
    todo = rule.hint if rule is not None and rule.hint else f"give {'something ' * (wanted in _ADJECTIVES)}{wanted}."
    if isinstance(part, int) and part > LARGEST:
        found = f"It is above {LARGEST:,}, the largest count."
    if isinstance(part, float) and LARGEST_FLOAT < part < math.inf:
        found = f"It is above {LARGEST_FLOAT}, the largest number in float32."
    if mismatch.why is not None:
        found = mismatch.why
    elif mismatch.place:
        found = f"In it, {' of '.join(reversed(mismatch.place))} is {_shown(part)}, of type {type(part).__name__}."
    elif isinstance(part, type):
        todo = f"call the class to make one: {part.__name__}()."
    elif choices:
        near = nearest(str(value), choices, most=1).removeprefix("Nearest names: ").removesuffix(".")
        found = f"The choices are {_joined([repr(choice) for choice in choices], 'and')}."
        todo = f"write {near!r}." if near in choices else todo
    if todo.startswith("give") and isinstance(default, bool | int | float | str):
        todo = f"leave it out for {default!r}."
    return error(f"{what} must be {wanted}, got {_shown(value)}.", found, todo)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = "\n"
    short = len(text) <= LONGEST and "\n" not in text
    return text if short else f"{_article(type(value).__name__)} {type(value).__name__}"


def _article(name: str) -> str:
    return "an" if name[0] in "AEIOUaeiou" or name.startswith("nn.") else "a"


_NOUNS: dict[Any, tuple[str, str]] = {
    int: ("an integer", "integers"),
    float: ("a finite number", "finite numbers"),
    str: ("a string", "strings"),
    bool: ("True or False", "True or False"),
    None: ("None", "None"),
    type(None): ("None", "None"),
    Path: ("a path", "paths"),
}


_ADJECTIVES = ("callable", "iterable")


def _text(hint: Any, *, many: bool = False) -> str:
    """Say what a hint allows; None goes without saying."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    rule = _rule(hint)
    if rule is not None:
        one, _ = _NOUNS.get(inside[0], ("a value", ""))
        return rule.says.format(a=one, noun=one.partition(" ")[2])
    if origin is Annotated:
        return _text(inside[0], many=many)
    if hint in _NOUNS:
        return _NOUNS[hint][many]
    if _is_union(hint):
        rest = [one for one in inside if one is not type(None)]
        if str in rest and any(typing.get_origin(one) is os.PathLike for one in rest):
            rest = [Path, *(one for one in rest if one is not str and typing.get_origin(one) is not os.PathLike)]
        one_by_one = [repr(choice) for one in rest if typing.get_origin(one) is Literal for choice in typing.get_args(one)]
        return _joined(one_by_one + [_text(one, many=many) for one in rest if typing.get_origin(one) is not Literal], "or")
    if origin is Literal:
        return _joined([repr(choice) for choice in inside], "or")
    if origin is tuple and inside[-1:] != (...,):
        return f"{len(inside)} items ({', '.join(_text(one) for one in inside)})"
    if origin in _ITERABLES:
        plain = inside[:1] in ((), (Any,)) or isinstance(inside[0], TypeVar)
        if plain and origin is collections.abc.Iterable:
            return "iterable"
        each = _rule(inside[0]) if inside else None
        return f"a sequence of {_text(inside[0], many=True) if each is None else f'items, each {_text(inside[0])}'}"
    if origin in (dict, collections.abc.Mapping):
        return f"a mapping from {_text(inside[0], many=True)} to {_text(inside[1], many=True)}"
    if origin is type:
        return f"a subclass of {_name(inside[0])}"
    if origin is collections.abc.Callable:
        return "callables" if many else "callable"
    name = _name(origin or hint)
    return f"objects of type {name}" if many else f"{_article(name)} {name}"


def _rule(hint: Any) -> Rule | None:
    inside = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    return next((one for one in reversed(inside) if isinstance(one, Rule)), None)


def _name(kind: Any) -> str:
    name = str(getattr(kind, "__name__", kind))
    return f"nn.{name}" if getattr(kind, "__module__", "").startswith("torch.nn.modules") else name


def _choices(hint: Any) -> Iterator[Any]:
    """Yield the values of a Literal, also of one among other hints."""
    for inside in typing.get_args(hint):
        if typing.get_origin(hint) is Literal:
            yield inside
        elif typing.get_origin(hint) is Annotated or _is_union(hint):
            yield from _choices(inside)


def _joined(parts: list[str], word: str) -> str:
    return f" {word} ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
