"""Ways to damage a file, and to forge the JSON and the tensors in it."""

from __future__ import annotations

import io
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.torture.watch import bomb

DEEP = "a value that is 100,000 lists deep"
OUTSIDE = "../../../../../../../../etc/passwd"
HUGE = 10**400


def damage(chance: random.Random, folder: Path, names: list[str]) -> str:
    """Damage one file of a folder in one way, and say how."""
    name, how = chance.choice(names), chance.choice(list(DAMAGES))
    path = folder / name
    content = path.read_bytes()
    changed = DAMAGES[how](content, path, chance, folder, names)
    if changed is not None:
        path.write_bytes(changed)
    return f"{name}: {how}"


def _flip(content: bytes, *_: Any, chance: random.Random, times: int = 1) -> bytes:
    changed = bytearray(content or b" ")
    for _index in range(times):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _digit(content: bytes, chance: random.Random) -> bytes:
    places = [place for place, byte in enumerate(content[:4096]) if chr(byte).isdigit()] or [0]
    place = chance.choice(places)
    return content[:place] + str((content[place] + 1) % 10).encode() + content[place + 1 :]


def _swap(path: Path, chance: random.Random, folder: Path, names: list[str]) -> bytes:
    other = folder / chance.choice([name for name in names if folder / name != path] or names)
    content = other.read_bytes()
    other.write_bytes(path.read_bytes())
    return content


def _instead(make: Callable[[Path], Any]) -> Callable[..., None]:
    """Return a change that puts something else than a file in the place of a file."""

    def change(_content: bytes, path: Path, *_: Any) -> None:
        path.unlink()
        make(path)

    return change


def _torch_file(path: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"weight": torch.ones(3)}, buffer)
    return buffer.getvalue()


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


DAMAGES: dict[str, Callable[..., bytes | None]] = {
    "a bit flipped": lambda content, path, chance, *_: _flip(content, chance=chance),
    "nine bits flipped": lambda content, path, chance, *_: _flip(content, chance=chance, times=9),
    "a digit changed": lambda content, path, chance, *_: _digit(content, chance),
    "cut": lambda content, path, chance, *_: content[: chance.randrange(max(1, len(content)))],
    "its end cut": lambda content, path, chance, *_: content[:-1],
    "longer": lambda content, path, chance, *_: content + bytes(chance.randrange(1, 100)),
    "zeros": lambda content, *_: bytes(len(content)),
    "noise": lambda content, path, chance, *_: chance.randbytes(len(content)),
    "empty": lambda *_: b"",
    "not text": lambda *_: b"\xff\xfe\x00\x80" * 20,
    "swapped with another": lambda content, path, chance, folder, names: _swap(path, chance, folder, names),
    "a pickle": lambda content, path, chance, folder, names: bomb(folder / "executed"),
    "a file of torch.save": lambda content, path, *_: _torch_file(path),
    "other JSON": lambda *_: b'{"a": [1, 2, 3]}',
    "deep JSON": lambda *_: b"[" * 100_000 + b"]" * 100_000,
    "deleted": _instead(lambda path: None),
    "a folder": _instead(lambda path: path.mkdir()),
    "a FIFO": _instead(lambda path: os.mkfifo(path)),
    "a link to /dev/zero": _instead(lambda path: path.symlink_to("/dev/zero")),
    "a link to itself": _instead(lambda path: path.symlink_to(path)),
    "a link to nothing": _instead(lambda path: path.symlink_to("nothing")),
    "a terabyte": _instead(_sparse),
}


def forge(chance: random.Random, tree: Any, important: list[list[Any]]) -> tuple[str, str]:
    """Replace or remove one value of a JSON tree by what cannot be right; return the text of it, and how."""
    there = [path for path in important if _has(tree, path)]
    path = chance.choice(there) if there and chance.random() < 0.4 else _walk(chance, tree)
    *parents, last = path
    parent = tree
    for key in parents:
        parent = parent[key]
    was = parent[last]
    where = "/".join(map(str, path))
    if isinstance(parent, dict) and chance.random() < 0.15:
        del parent[last]
        return json.dumps(tree), f"{where} removed"
    value = chance.choice([value for value in _wrong_for(was) if _differs(value, was)])
    parent[last] = value
    text = json.dumps(tree).replace(json.dumps(DEEP), "[" * 100_000 + "]" * 100_000)
    return text, f"{where} = {value!r:.40}"


def _wrong_for(was: Any) -> list[Any]:
    """Return values that no reader can take for a value of the same kind."""
    everywhere = [None, {}, [], [None], {"a": 1}, {"tensor": "a"}, DEEP]
    if isinstance(was, bool):
        return [*everywhere, "no", 3, math.nan]
    if isinstance(was, int):
        return [*everywhere, "x", 1.5, math.nan, math.inf, -HUGE, HUGE]
    if isinstance(was, float):
        return [*everywhere, "x", math.nan, -math.inf, HUGE]
    if isinstance(was, str):
        return [*everywhere, 3, math.nan, "", "no such name", OUTSIDE, "\x1b[2J", "x" * 100_000]
    return [*everywhere, 3, "x", math.nan, HUGE]


def _differs(value: Any, was: Any) -> bool:
    return repr(value) != repr(was)


def _walk(chance: random.Random, tree: Any) -> list[Any]:
    """Choose a place by going down: a list of a thousand numbers is chosen as often as its neighbour."""
    key = chance.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
    inside = tree[key]
    if not (isinstance(inside, dict | list) and inside) or chance.random() < 0.15:
        return [key]
    return [key, *_walk(chance, inside)]


def _has(tree: Any, path: list[Any]) -> bool:
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


def forge_tensors(chance: random.Random, content: bytes) -> tuple[bytes, str]:
    """Change the header of a safetensors file, or a tensor in it, to what does not fit; return the bytes, and how."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = chance.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    how = chance.choice(["shape", "type", "offsets", "removed", "renamed", "added", "huge", "negative", "text", "length"])
    if how == "shape":
        entry["shape"] = [*entry["shape"], 1] if chance.random() < 0.5 else [*entry["shape"][::-1], 1]
    elif how == "type":
        entry["dtype"] = {"F32": "I32", "I64": "F64", "U8": "I8", "F64": "I64"}.get(entry["dtype"], "BOOL")
    elif how == "offsets":
        entry["data_offsets"] = [begin + 4 for begin in entry["data_offsets"]]
    elif how == "removed":
        del header[name]
    elif how == "renamed":
        header[OUTSIDE] = header.pop(name)
    elif how == "added":
        header["students/more"] = {"dtype": "F32", "shape": [1], "data_offsets": [len(data), len(data) + 4]}
        data += bytes(4)
    elif how in ("huge", "negative"):
        entry["shape"] = [2**62, 2**62] if how == "huge" else [-1]
    elif how == "text":
        entry["shape"] = "x"
    text = json.dumps(header).encode()
    size = 2**40 if how == "length" else len(text)
    return size.to_bytes(8, "little") + text + data, f"{how} of {name}"
