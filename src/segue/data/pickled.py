"""The pickled files of CIFAR, read without running what they say.

A pickle is a small program, and loading it runs it. Here its instructions are only listed (by the standard library's
disassembler) and the few that CIFAR's files consist of are followed by hand: numbers, strings, lists, dictionaries, and arrays
of bytes. Anything else, above all a call of any function, is refused before it happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from pickletools import genops
from typing import Any

import torch
from torch import Tensor

from segue.data.files import contents, unreadable
from segue.errors import DataError

_RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_NAMES = (*_RECONSTRUCT, "numpy ndarray", "numpy dtype", "_codecs encode")
_LITERALS = (
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINSTRING", "BINSTRING", "SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"),
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class _Name:
    """A function or class that the file names; it is never looked up."""

    text: str


@dataclass
class _Call:
    """What the file wants to be built, and the state it wants to give it."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


class _RefusedError(Exception):
    """The file asks for something that CIFAR's files do not need."""


def read_pickled(asked: str, path: Path) -> dict[str, Any]:
    """Read a dictionary of numbers, strings, lists and (as tensors) arrays of bytes."""
    content = contents(asked, path)
    try:
        entries = _follow((opcode.name, argument) for opcode, argument, _ in genops(content))
        return {key: _tensor(value) if isinstance(value, _Call) else value for key, value in entries.items()}
    except _RefusedError as error:
        hint = "CIFAR's own files need no such thing: do not trust this one, fetch it again from its origin."
        raise DataError(asked, f"{path} asks for {error}, which was not done.", hint) from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # cut short, or instructions in a senseless order
        raise unreadable(asked, path, error) from error


def _follow(instructions: Iterator[tuple[str, Any]]) -> Any:
    stack: list[Any] = []
    outer: list[list[Any]] = []  # the stacks below each mark
    memo: dict[int, Any] = {}
    for name, argument in instructions:
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if name == "EMPTY_DICT" else [])
        elif name == "MARK":
            outer.append(stack)
            stack = []
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            items, stack = stack, outer.pop()
            _collect(name, stack, items)
        elif name in ("APPEND", "SETITEM"):
            count = 1 if name == "APPEND" else 2
            items, stack = stack[-count:], stack[:-count]
            _collect(name + "S", stack, items)
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            stack.append(_named(argument if name == "GLOBAL" else "{} {}".format(*_popped(stack, 2))))
        elif name == "REDUCE":
            stack.append(_called(*_popped(stack, 2)))
        elif name == "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], _Call):
                raise _RefusedError("a change of something that is no array")
            stack[-1].state = state
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise _RefusedError(f"the instruction {name}")
    raise ValueError("there is no end")


def _popped(stack: list[Any], count: int) -> list[Any]:
    popped = stack[-count:]
    del stack[-count:]
    return popped


def _collect(name: str, stack: list[Any], items: list[Any]) -> None:
    if name == "TUPLE":
        stack.append(tuple(items))
    elif name == "APPENDS":
        stack[-1].extend(items)
    else:
        stack[-1].update(zip(items[::2], items[1::2], strict=True))


def _named(text: str) -> _Name:
    if text not in _NAMES:
        raise _RefusedError(text.replace(" ", "."))
    return _Name(text)


def _called(name: Any, arguments: Any) -> Any:
    if name == _Name("_codecs encode"):  # how Python 3 writes bytes for Python 2
        return arguments[0].encode("latin-1")
    if name in [_Name(text) for text in (*_RECONSTRUCT, "numpy dtype")]:
        return _Call(name.text, arguments)
    raise _RefusedError(f"a call of {name.text if isinstance(name, _Name) else type(name).__name__}")


def _tensor(array: _Call) -> Tensor:
    if array.name not in _RECONSTRUCT:
        raise TypeError("it holds a dtype in the place of an array")
    _, shape, dtype, by_columns, data = array.state
    if not isinstance(dtype, _Call) or dtype.arguments[0] not in ("u1", "|u1"):
        raise TypeError("its array is not one of bytes")
    # Python 2 had one type for texts and bytes; the disassembler shows it as text
    content = bytearray(data.encode("latin-1") if isinstance(data, str) else data)
    if len(content) != prod(shape):
        raise ValueError(f"an array of shape {shape} has {len(content)} bytes")
    if not content:
        return torch.empty(shape, dtype=torch.uint8)
    flat = torch.frombuffer(content, dtype=torch.uint8)
    return flat.view(shape[::-1]).permute(*range(len(shape))[::-1]) if by_columns else flat.view(shape)
