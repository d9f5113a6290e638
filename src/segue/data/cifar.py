"""CIFAR-10 and CIFAR-100 as their authors publish them, in the binary and in the Python version.

The Python version consists of pickles. A pickle is a small program, and loading it runs it. Here its instructions are only
listed (by the standard library's disassembler), and the few that CIFAR's files consist of are followed by hand: numbers,
strings, lists, dictionaries, and arrays of bytes. Anything else, above all a call of any function, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from pickletools import genops
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segue.data.dataset import Dataset, Examples, image_dataset
from segue.data.files import contents, existing_folder, unreadable
from segue.errors import DataError

_PIXELS = 3 * 32 * 32
_ARRAY = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_NAMES = (*_ARRAY, "numpy ndarray", "numpy dtype", "_codecs encode")
_LITERALS = (
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINSTRING", "BINSTRING", "SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"),
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Layout(NamedTuple):
    """Where a version of CIFAR stores what."""

    binary: str
    pickled: str
    train: tuple[str, ...]
    test: str
    classes: int
    label: str  # its key in the Python version
    label_bytes: int  # per image in the binary version; the last one counts


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
CIFAR10 = _Layout("cifar-10-batches-bin", "cifar-10-batches-py", _BATCHES, "test_batch", 10, "labels", 1)
CIFAR100 = _Layout("cifar-100-binary", "cifar-100-python", ("train",), "test", 100, "fine_labels", 2)


def read_cifar(problem: str, folder: Path, layout: _Layout) -> Dataset:
    """Read the binary version if it exists, since it is nothing but bytes, else the Python version."""
    if (folder / layout.binary).is_dir():
        folder, suffix, read = folder / layout.binary, ".bin", _read_binary
    else:
        folder, suffix, read = existing_folder(problem, folder / layout.pickled), "", _read_pickled
    batches = [read(problem, folder / f"{name}{suffix}", layout) for name in layout.train]
    if len({len(batch) for batch in batches}) > 1:
        found = f"The batches in {folder} have {', '.join(str(len(batch)) for batch in batches)} images."
        raise DataError(problem, found, "All must have the same number; get the files again.")
    train = Examples(torch.cat([batch.inputs for batch in batches]), torch.cat([batch.labels for batch in batches]))
    return image_dataset(problem, train, read(problem, folder / f"{layout.test}{suffix}", layout), layout.classes)


def _read_binary(problem: str, path: Path, layout: _Layout) -> Examples:
    content = bytearray(contents(problem, path))
    record = layout.label_bytes + _PIXELS
    if not content or len(content) % record:
        raise unreadable(problem, path, f"its {len(content)} bytes are not a multiple of {record}")
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, record)
    images = records[:, layout.label_bytes :].reshape(-1, 3, 32, 32)
    return Examples(images, records[:, layout.label_bytes - 1].long())


def _read_pickled(problem: str, path: Path, layout: _Layout) -> Examples:
    content = contents(problem, path)
    try:
        entries = _follow(content)
        pixels, labels = entries.get("data"), entries.get(layout.label)
        pixels = _tensor(pixels) if isinstance(pixels, _Call) else pixels
    except _RefusedError as error:
        hint = "CIFAR's own files need no such thing: do not trust this one, get it again from its origin."
        raise DataError(problem, f"{path} asks for {error}, which is refused.", hint) from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # cut short, or instructions in a senseless order
        raise unreadable(problem, path, error) from error
    if not isinstance(pixels, Tensor) or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise unreadable(problem, path, f"it has no array 'data' of N x {_PIXELS} bytes")
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 2**31 for label in labels):
        raise unreadable(problem, path, f"it has no list {layout.label!r} of integers")
    if len(labels) != len(pixels):
        raise unreadable(problem, path, f"it has {len(pixels)} images but {len(labels)} labels")
    return Examples(pixels.reshape(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64))


class _Name(str):
    """A function or class that the file names; it is never looked up."""


@dataclass
class _Call:
    """What the file wants to build, and the state it wants to give it."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


class _RefusedError(Exception):
    """The file asks for something that CIFAR's files do not need."""


def _follow(content: bytes) -> Any:
    stack: list[Any] = []
    outer: list[list[Any]] = []  # the stacks below each mark
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in genops(content):
        name = opcode.name
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if name == "EMPTY_DICT" else [])
        elif name in _TUPLES:
            stack.append(tuple(_popped(stack, _TUPLES[name])))
        elif name == "MARK":
            outer.append(stack)
            stack = []
        elif name == "TUPLE":
            outer[-1].append(tuple(stack))
            stack = outer.pop()
        elif name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS"):
            if name.endswith("S"):
                items, stack = stack, outer.pop()
            else:
                items = _popped(stack, 1 if name == "APPEND" else 2)
            if name.startswith("APPEND"):
                stack[-1].extend(items)
            else:
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            text = str(argument) if name == "GLOBAL" else "{} {}".format(*_popped(stack, 2))
            if text not in _NAMES:
                raise _RefusedError(text.replace(" ", "."))
            stack.append(_Name(text))
        elif name == "REDUCE":
            stack.append(_called(*_popped(stack, 2)))
        elif name == "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], _Call):
                raise _RefusedError("a change of something that is not an array")
            stack[-1].state = state
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise _RefusedError(f"the instruction {name}")
    raise ValueError("there is no end")


def _popped(stack: list[Any], count: int) -> list[Any]:
    popped, stack[-count:] = stack[-count:], []
    return popped


def _called(name: Any, arguments: Any) -> Any:
    if not isinstance(name, _Name) or name == "numpy ndarray":
        raise _RefusedError(f"a call of {name if isinstance(name, _Name) else type(name).__name__}")
    # `encode` is how Python 3 writes bytes for Python 2
    return arguments[0].encode("latin-1") if name == "_codecs encode" else _Call(name, arguments)


def _tensor(array: _Call) -> Tensor:
    if array.name not in _ARRAY:
        raise TypeError("it has a dtype where an array belongs")
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
