"""Wrong calls: every public callable with one wrong argument at a time, and what became of each.

A call is *refused* (a Segue error), *accepted* where its type hint allows the value, *nonsense* where it was accepted although
the hint does not allow it, *foreign* where another exception came out, *changed* where it failed and left the model changed, or
*hung*. The judge of what a hint allows is written here on purpose, apart from the one in the package.
"""

from __future__ import annotations

import collections.abc
import hashlib
import inspect
import math
import os
import re
import shutil
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segue.core.handover import Handover
from segue.errors import SegueError
from tests.torture.public_names import parameters, public_callables
from tests.torture.valid_calls import AT_THE_BORDER_ONLY, EXPECTED_FOREIGN, NOT_CALLED_BY_USERS, USES, VALID, VALID_AND_LONG
from tests.torture.watch import HungError, within

SECONDS = 20  # after which a call counts as hung
REFUSED, ACCEPTED, NONSENSE, FOREIGN, CHANGED, HUNG = "refused", "accepted", "nonsense", "foreign", "changed", "hung"


class Thing:
    """An object that means nothing."""

    def __repr__(self) -> str:
        return "Thing()"


WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "1.5": lambda: 1.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "10**30": lambda: 10**30,
    "1e300": lambda: 1e300,
    "'x'": lambda: "x",
    "'no'": lambda: "no",
    "''": lambda: "",
    "b'x'": lambda: b"x",
    "[]": list,
    "['x']": lambda: ["x"],
    "[nan]": lambda: [math.nan],
    "{}": dict,
    "{'x': 'x'}": lambda: {"x": "x"},
    "{3: None}": lambda: {3: None},
    "object()": Thing,
    "int": lambda: int,
    "tensor": lambda: torch.full((2, 2), torch.nan),
    "lambda: None": lambda: lambda *_, **__: None,
    "lambda: 'x'": lambda: lambda *_, **__: "x",
    "lambda: nan": lambda: lambda *_, **__: math.nan,
    "lambda: tensor": lambda: lambda *_, **__: torch.zeros(2, 7),
    "module": lambda: nn.Linear(3, 3),
}


@dataclass(frozen=True)
class WrongCall:
    """A public callable, one of its parameters, and a value that may be wrong for it."""

    name: str
    parameter: str
    label: str
    value: Callable[[], Any]

    def __str__(self) -> str:
        return f"{self.name}({self.parameter}={self.label})"


@dataclass(frozen=True)
class Verdict:
    """What became of a call."""

    call: WrongCall
    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.call}: {self.detail}"


def targets() -> dict[str, Callable[..., Any]]:
    """Return the public callables that users call."""
    exempt = [re.compile(pattern) for pattern in NOT_CALLED_BY_USERS]
    return {name: made for name, made in public_callables().items() if not any(p.fullmatch(name) for p in exempt)}


def calls(values: dict[str, Callable[[], Any]] | None = None) -> Iterator[WrongCall]:
    """Yield every wrong call: each public callable, each of its parameters, each value."""
    for name, target in targets().items():
        allowed = hints(target)
        for parameter in parameters(target):
            for label, value in (values or WRONG).items():
                if name in AT_THE_BORDER_ONLY and allows(allowed.get(parameter, Any), value()):
                    continue
                call = WrongCall(name, parameter, label, value)
                if str(call) not in VALID_AND_LONG:
                    yield call


def run(call: WrongCall, folder: Path) -> Verdict:
    """Make one wrong call in a fresh folder, and judge it."""
    target = targets_once()[call.name]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    arguments = VALID[call.name](folder)
    value = call.value()
    positional = [arguments.pop("self")] if "self" in arguments else []
    positional += arguments.pop("args", ())
    models = [x for x in (*positional, *arguments.values()) if isinstance(x, nn.Module | Handover)]
    before = [fingerprint(x) for x in models]
    arguments[call.parameter] = value
    hint = hints(target).get(call.parameter, Any)
    try:
        with within(SECONDS), warnings.catch_warnings(), _inside(folder):
            warnings.simplefilter("ignore")
            made = target(*positional, **arguments)
            if isinstance(made, typing.ContextManager) and not isinstance(made, nn.Module):
                with made:
                    pass
            if call.name in USES:
                USES[call.name](made, folder)
    except HungError:
        return Verdict(call, HUNG)
    except Exception as error:
        if [fingerprint(x) for x in models] != before:
            return Verdict(call, CHANGED, _line(error))
        return Verdict(call, REFUSED if isinstance(error, SegueError) else FOREIGN, _line(error))
    return Verdict(call, ACCEPTED if allows(hint, value) else NONSENSE)


def reason(verdict: Verdict) -> str:
    """Return why a foreign error is right, or nothing."""
    return next((why for call, why in EXPECTED_FOREIGN.items() if re.fullmatch(call, str(verdict.call))), "")


def fingerprint(thing: nn.Module | Handover) -> str:
    """Hash everything of a model that a failed call must leave alone."""
    model = thing.model if isinstance(thing, Handover) else thing
    digest = hashlib.blake2b()

    def add(*parts: Any) -> None:
        digest.update(repr(parts).encode())

    if isinstance(thing, Handover):
        add(thing.steps_done, thing.total_steps, sorted(thing.alphas.items()), thing._ended)
    for name, module in model.named_modules(remove_duplicate=False):
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        add(name, type(module).__qualname__, module.training, hooks, sorted(vars(module).keys()))
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        add(name, tensor.requires_grad, tensor.dtype, tuple(tensor.shape))
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def allows(hint: Any, value: Any) -> bool:
    """Tell whether a type hint allows a value; numbers are finite, True is no number, and 1 is not True."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return allows(inside[0], value)
    if hint in (Any, object, inspect.Parameter.empty) or isinstance(hint, str | typing.TypeVar):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(allows(one, value) for one in inside)
    if hint in (None, type(None)):
        return value is None
    if origin is typing.Literal:
        return any(value == one and type(value) is type(one) for one in inside)
    if hint is bool:
        return isinstance(value, bool)
    if hint in (int, float):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (math.isfinite(value) if hint is float else isinstance(value, int))
    if origin is type:
        return isinstance(value, type) and allows_class(inside[0], value)
    if origin is collections.abc.Callable:
        return callable(value) and not (isinstance(value, type) and inside and not allows_class(inside[-1], value))
    if hint is Path or origin is os.PathLike or hint is os.PathLike:
        return isinstance(value, str | os.PathLike)
    if origin in (tuple, list, collections.abc.Sequence, collections.abc.Iterable):
        if isinstance(value, str | bytes | dict) or not isinstance(value, collections.abc.Iterable):
            return False
        items = inside[:1] if origin is not tuple or inside[-1:] == (...,) else inside
        listed = [] if isinstance(value, Tensor) else list(value)
        fits = len(items) == 1 or len(items) == len(listed)
        return fits and all(allows(items[min(i, len(items) - 1)], one) for i, one in enumerate(listed))
    if origin in (dict, collections.abc.Mapping):
        return isinstance(value, dict) and all(allows(inside[0], k) and allows(inside[1], v) for k, v in value.items())
    if getattr(hint, "_is_protocol", False):
        return all(hasattr(value, name) for name in vars(hint) if not name.startswith("_"))
    return isinstance(value, hint) if isinstance(hint, type) else True


def allows_class(wanted: Any, kind: type) -> bool:
    return issubclass(kind, wanted) if isinstance(wanted, type) else wanted is Any


def hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the type hints of what a callable takes."""
    named = inspect.unwrap(target.__init__ if inspect.isclass(target) and "__init__" in vars(target) else target)
    try:
        source = target if inspect.isclass(target) and hasattr(target, "__dataclass_fields__") else named
        return typing.get_type_hints(source)
    except (NameError, TypeError):
        return {}


_TARGETS: dict[str, Callable[..., Any]] = {}


def targets_once() -> dict[str, Callable[..., Any]]:
    if not _TARGETS:
        _TARGETS.update(targets())
    return _TARGETS


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Stand in a folder, so that a name given as a path writes there."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
