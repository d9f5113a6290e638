"""Students by what one types: 'WindowedLinear(window=64)' becomes the object, and nothing else is ever run."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

from segue import students
from segue.errors import ConfigError, nearest

KINDS = {
    name: made for name in students.__all__ if dataclasses.is_dataclass(made := getattr(students, name)) and callable(made)
}


def student(text: str) -> Any:
    """Make a student factory of the words for it: a name, with settings in brackets.

    >>> student("WindowedLinear(window=32)").window
    32
    >>> student("Reinit")
    Reinit(init=None)
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise _unclear(text, f"It cannot be read: {error.msg}.") from None
    if not isinstance(node, ast.Name | ast.Call):
        raise _unclear(text, "It does not name a student.")
    made = _made(node, text)
    if not callable(made):
        raise _unclear(text, f"{type(made).__name__} makes no student by itself.")
    return made


def _made(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name):
        return _kind(node.id, text)()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        kind = _kind(node.func.id, text)
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            raise _unclear(text, "Settings are given by name.")
        known = [field.name for field in dataclasses.fields(kind)]
        settings = {}
        for keyword in node.keywords:
            assert keyword.arg is not None
            if keyword.arg not in known:
                raise _unclear(text, f"{kind.__name__} has no setting {keyword.arg!r}. {nearest(keyword.arg, known)}")
            settings[keyword.arg] = _made(keyword.value, text)
        return kind(**settings)
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _unclear(text, f"{ast.unparse(node)} is neither a plain value nor a kind of student.") from None


def _kind(name: str, text: str) -> Any:
    if name not in KINDS:
        raise _unclear(text, nearest(name, list(KINDS)))
    return KINDS[name]


def _unclear(text: str, why: str) -> ConfigError:
    return ConfigError(f"the student {text!r} was asked for.", why, "for example 'WindowedLinear(window=64)' or 'NarrowMlp()'.")
