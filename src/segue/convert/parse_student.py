"""Students, methods, losses and spans from text: 'WindowedLinear(window=64)' becomes the object, nothing else is ever run."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from segue import students
from segue.errors import ConfigError, nearest
from segue.methods import ALL, Method
from segue.plan import SERIALIZER, Plan
from segue.settings import RENAMED_FIELDS
from segue.sites import Span

KINDS = {
    name: made for name in students.__all__ if dataclasses.is_dataclass(made := getattr(students, name)) and callable(made)
}
FACTORIES = students.names()
PARTS = {kind.partition(".")[2]: made for kind, made in SERIALIZER.kinds.items()}  # all that a plan is made of, by name
LOSSES = [kind.partition(".")[2] for kind in SERIALIZER.kinds if kind.startswith("losses.")]
OPTIONS = ("sites", "student", "train", "seed", "distill", "guidance")  # of a plan, each with its own on the command line
Refuse = Callable[[str], ConfigError]


def student(text: str) -> Any:
    """Parse a student factory: a name, with its settings in brackets.

    >>> student("WindowedLinear(window=32)").window
    32
    >>> student("Reinit")
    Reinit()
    """
    refuse = _refusal(f"{text!r} is not a student.", "'WindowedLinear(window=64)' or 'NarrowMlp(ratio=0.5)'")
    return _made(_call(text, FACTORIES, refuse), KINDS, refuse)


def method(text: str) -> tuple[Method, dict[str, Any]]:
    """Parse a method and its settings.

    >>> made, settings = method("lolcats(hold=0.3)")
    >>> made(sites="*", **settings).phases[0].length
    0.3
    """
    refuse = _refusal(f"{text!r} is not a method.", "'dcr_dfg' or 'lolcats(hold=0.3)'; `segue methods` lists them")
    call = _call(text, list(ALL), refuse)
    assert isinstance(call.func, ast.Name)
    made = ALL[call.func.id]
    own = [name for name, one in inspect.signature(made).parameters.items() if one.kind is one.KEYWORD_ONLY]
    known = [name for name in dict.fromkeys((*own, *(f.name for f in dataclasses.fields(Plan)))) if name not in OPTIONS]
    settings = _settings(call, known, PARTS, refuse)
    try:
        made(sites="*", **settings)
    except (TypeError, ValueError) as error:
        raise refuse(str(error).splitlines()[0]) from None
    return made, settings


def loss(text: str, option: str, otherwise: Any) -> Any:
    """Parse a loss: its name with settings, 'none', or a number, which is the weight of the one that is there `otherwise`.

    >>> from segue.losses import LogitDistillation
    >>> loss("0.5", "distill", LogitDistillation(temperature=1.0)).weight
    0.5
    >>> loss("none", "distill", LogitDistillation())
    """
    if text.strip().lower() == "none":
        return None
    refuse = _refusal(
        f"{text!r} is not a loss for --{option}.", "'LogitDistillation(temperature=1)', a weight such as 0.5, or 'none'"
    )
    try:
        weight = float(text)
    except ValueError:
        return _made(_call(text, LOSSES, refuse), PARTS, refuse)
    try:
        return dataclasses.replace(otherwise, weight=weight)
    except (TypeError, ValueError) as error:
        raise refuse(str(error).splitlines()[0]) from None


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
        raise ConfigError(
            f"{text!r} is not a span of layers.",
            f"It cannot be parsed: {(str(error).splitlines() or ['it is no call'])[0].rstrip('.')}.",
            hint,
        ) from None


def _call(text: str, names: list[str], refuse: Refuse) -> ast.Call:
    """Parse a name, or a call of it."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise refuse(f"It cannot be parsed: {error.msg}.") from None
    if not isinstance(node, ast.Name | ast.Call):
        raise refuse("It does not name one.")
    named = node.id if isinstance(node, ast.Name) else getattr(node.func, "id", "")
    if named not in names:
        raise refuse(nearest(named, names))
    return node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])


def _settings(call: ast.Call, known: list[str], kinds: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise refuse("Its settings must be given by name.")
    of = call.func.id if isinstance(call.func, ast.Name) else "It"
    renamed = RENAMED_FIELDS.get(f"students.{of}", {})
    found = {}
    for keyword in call.keywords:
        assert keyword.arg is not None
        name = renamed.get(keyword.arg, keyword.arg)
        if name not in known:
            raise refuse(f"{of} has no setting {name!r}. {nearest(name, known)}")
        found[name] = _made(keyword.value, kinds, refuse)
    return found


def _made(node: ast.expr, kinds: Mapping[str, Any], refuse: Refuse) -> Any:
    if isinstance(node, ast.Name):
        node = ast.Call(func=node, args=[], keywords=[])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id not in kinds:
            raise refuse(nearest(node.func.id, list(kinds)))
        kind = kinds[node.func.id]
        settings = _settings(node, [field.name for field in dataclasses.fields(kind)], kinds, refuse)
        try:
            return kind(**settings)
        except TypeError as error:
            raise refuse(f"{kind.__name__}: {error}.") from None
    try:
        return ast.literal_eval(node)
    except (TypeError, ValueError):
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(_made(part, kinds, refuse) for part in node.elts)
        raise refuse(f"{ast.unparse(node)} is neither a plain value nor one of Segue's parts.") from None


def _refusal(wrong: str, examples: str) -> Refuse:
    return lambda why: ConfigError(wrong, why, f"give for example {examples}.")
