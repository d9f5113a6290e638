"""Students and spans from text: 'WindowedLinear(window=64)' becomes the object, and nothing else is ever run."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from typing import Any

from segue import students
from segue.errors import ConfigError, nearest
from segue.settings import RENAMED_FIELDS
from segue.sites import Span

KINDS = {
    name: made for name in students.__all__ if dataclasses.is_dataclass(made := getattr(students, name)) and callable(made)
}
FACTORIES = [name for name, kind in KINDS.items() if [*inspect.signature(kind.__call__).parameters][1:] == ["teacher", "site"]]


def student(text: str) -> Any:
    """Parse a student factory: a name, with its settings in brackets.

    >>> student("WindowedLinear(window=32)").window
    32
    >>> student("Reinit")
    Reinit()
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise _invalid(text, f"It cannot be parsed: {error.msg}.") from None
    if not isinstance(node, ast.Name | ast.Call):
        raise _invalid(text, "It does not name a student.")
    named = node.id if isinstance(node, ast.Name) else getattr(node.func, "id", "")
    if named not in FACTORIES:
        raise _invalid(text, nearest(named, FACTORIES))
    return _made(node, text)


def sites(text: str) -> str | Span:
    """Parse a pattern, or a span of layers.

    >>> sites("Span('model.layers', every=2)")
    Span(layers='model.layers', every=2, first=0, last=None)
    """
    if not text.lstrip().startswith("Span("):
        return text
    try:
        call = ast.parse(text.strip(), mode="eval").body
        assert isinstance(call, ast.Call)
        given = [ast.literal_eval(value) for value in call.args]
        return Span(*given, **{str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords})
    except (SyntaxError, ValueError, TypeError, AssertionError) as error:
        hint = "give for example \"Span('model.layers', every=2)\"."
        raise ConfigError(f"{text!r} is not a span of layers.", f"It cannot be parsed: {error}.", hint) from None


def _made(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name):
        node = ast.Call(func=node, args=[], keywords=[])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id not in KINDS:
            raise _invalid(text, nearest(node.func.id, list(KINDS)))
        kind = KINDS[node.func.id]
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            raise _invalid(text, "Its settings must be given by name.")
        known = [field.name for field in dataclasses.fields(kind)]
        settings = {}
        for keyword in node.keywords:
            assert keyword.arg is not None
            name = RENAMED_FIELDS.get(f"students.{kind.__name__}", {}).get(keyword.arg, keyword.arg)
            if name not in known:
                raise _invalid(text, f"{kind.__name__} has no setting {name!r}. {nearest(name, known)}")
            settings[name] = _made(keyword.value, text)
        try:
            return kind(**settings)
        except TypeError as error:
            raise _invalid(text, f"{kind.__name__}: {error}.") from None
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _invalid(text, f"{ast.unparse(node)} is neither a plain value nor a student.") from None


def _invalid(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"{text!r} is not a student.", why, "give for example 'WindowedLinear(window=64)' or 'NarrowMlp(ratio=0.5)'."
    )
