"""Many results in one text file for a repository: a JSON line per run, with what differs from an earlier line.

Evaluations are columns. Scores and epochs keep all digits, so that tables and tests come out the same; other measurements have
six, as the report shows fewer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

FILE = "results.jsonl"
FORMAT = 1
EXACT = ("step", "epoch", "alpha", "blend", "students")  # columns that keep all digits
LIKE, GONE = "like", "without"  # in a line: the number of the earlier line, and the keys of it that are left out
MARK = "="  # before a key that is itself called GONE, or GONE with marks


def pack(results: Iterable[dict[str, Any]]) -> str:
    """Write results, as plain data, as lines; unpack() reads them."""
    columns = [_in_columns(result) for result in results]
    first: dict[tuple[str, ...], int] = {}
    lines = [{"packed": FORMAT}]
    for index, data in enumerate(columns):
        info = data["run_info"]
        arm = tuple(str(info.get(name)) for name in ("experiment", "group", "method"))
        like = first.setdefault(arm, index)
        like = 0 if like == index else like  # the first of its method: like the first of all
        lines.append(data if index == 0 else {LIKE: like, **_difference(columns[like], data)})
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def unpack(text: str) -> list[dict[str, Any]]:
    """Read what pack() writes; ValueError, KeyError or TypeError if it is damaged."""
    head, *lines = text.splitlines()
    if (version := json.loads(head)["packed"]) != FORMAT:
        raise ValueError(f"it has the format {version!r}, and this version of Segue reads {FORMAT}")
    found: list[dict[str, Any]] = []
    for line in lines:
        data = json.loads(line)
        like = data.pop(LIKE, None)
        found.append(data if like is None else _merged(found[like], data))
    return [_in_points(data) for data in found]


def _in_columns(data: Mapping[str, Any]) -> dict[str, Any]:
    points = data["train_info"]["points"]
    columns = {name: _column(name, [point[name] for point in points]) for name in (points[0] if points else ())}
    return {**data, "train_info": {**_rounded(data["train_info"], "seconds", "flops"), "points": columns}}


def _column(name: str, values: list[Any]) -> Any:
    """Write the names of sites or scores once, where all evaluations that have any have the same."""
    known = [list(value) for value in values if isinstance(value, dict) and value]
    rounded = [value if name in EXACT else _six_digits(value) for value in values]
    if not known or any(names != known[0] for names in known):
        return rounded
    return {"names": known[0], "rows": [list(value.values()) if value else 0 for value in rounded]}


def _in_points(data: dict[str, Any]) -> dict[str, Any]:
    columns = {name: _values(column) for name, column in data["train_info"]["points"].items()}
    points = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return {**data, "train_info": {**data["train_info"], "points": points}}


def _values(column: Any) -> list[Any]:
    if isinstance(column, list):
        return column
    return [dict(zip(column["names"], row, strict=True)) if row else {} for row in column["rows"]]


def _rounded(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: _six_digits(value) if name in names else value for name, value in data.items()}


def _six_digits(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _six_digits(one) for name, one in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _difference(base: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes `data` of `base`."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        old, written = base.get(name), MARK + name if name.lstrip(MARK) == GONE else name
        if name not in base or not (isinstance(value, dict) and isinstance(old, dict)):
            if name not in base or value != old or type(value) is not type(old):
                found[written] = value
        elif inner := _difference(old, value):
            found[written] = inner
    if gone := [name for name in base if name not in data]:
        found[GONE] = gone
    return found


def _merged(base: Mapping[str, Any], difference: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in base.items() if name not in difference.get(GONE, ())}
    for written, value in difference.items():
        if written != GONE:
            name = written.removeprefix(MARK) if written.lstrip(MARK) == GONE else written
            nested = isinstance(value, dict) and isinstance(base.get(name), dict)
            found[name] = _merged(base[name], value) if nested else value
    return found
