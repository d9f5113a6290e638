"""Mutants: every small fault that can be planted in a source file.

A mutant changes one place: another comparison, a negated condition, `and` for `or`, other arithmetic, a constant off by one,
nothing returned, a statement or a context manager left out, a copy not made. Texts are left alone (docstrings, errors,
warnings, reprs), and so are annotations, assertions, decorators and imports.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

SIGNS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
PAIRS = [("<", "<="), (">", ">="), ("==", "!="), ("is", "is not"), ("in", "not in")]
OTHER_SIGN = dict(PAIRS) | {b: a for a, b in PAIRS}
ARITHMETIC = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/", ast.Mod: "*", ast.Pow: "*",
    ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|",
}  # fmt: skip
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}
COPIES = {"detach", "clone", "contiguous", "float", "cpu", "eval", "copy", "flatten", "resolve", "strip"}  # x.f() becomes x
WRAPPERS = {"detached", "deepcopy", "sorted", "reversed", "full", "list", "tuple", "set", "dict", "float", "int", "bool", "abs"}
LOOSE = (ast.NamedExpr, ast.BoolOp, ast.IfExp, ast.Lambda, ast.Compare)  # need parentheses beside an operator
TEXTS = {"__repr__", "__str__", "extra_repr"}  # methods that only write text
CONTEXT = 24  # characters of a statement that are shown around its change


@dataclass(frozen=True)
class Scope:
    """The function or method around a mutant, or its statement at the top of a module or class."""

    name: str  # dotted; empty where there is no function
    first: int
    last: int
    digest: str  # of its code: a result counts while it stays the same


def scope_of(statement: ast.stmt, name: str) -> Scope:
    assert statement.end_lineno is not None
    digest = hashlib.sha256(ast.unparse(statement).encode()).hexdigest()[:12]
    return Scope(name, statement.lineno, statement.end_lineno, digest)


def functions_of(source: str) -> list[Scope]:
    """Return the functions and methods of a source file, without those inside others."""

    def inside(body: list[ast.stmt], prefix: str) -> Iterator[Scope]:
        for statement in body:
            if isinstance(statement, ast.ClassDef):
                yield from inside(statement.body, f"{prefix}{statement.name}.")
            elif isinstance(statement, ast.FunctionDef):
                yield scope_of(statement, f"{prefix}{statement.name}")

    return list(inside(ast.parse(source).body, ""))


@dataclass(frozen=True)
class Mutant:
    """One fault: where it is, what it changes, and the source with it."""

    file: str
    function: str  # dotted, empty at the top of a module
    was: str
    now: str
    number: int  # of those in the function that read the same
    line: int
    scope: Scope
    reached: range  # the lines of its statement, counted from the scope's first; empty where no test of its own runs them
    source: str

    @property
    def key(self) -> str:
        again = f" ({self.number})" if self.number > 1 else ""
        return f"{self.file} {self.function}: {self.was} -> {self.now}{again}"


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Return all mutants of a source file.

    >>> [mutant.key for mutant in mutants_of("a.py", "def f(x):\\n    return x < 1")]
    ['a.py f: return x < 1 -> return None', 'a.py f: return x < 1 -> return x <= 1', 'a.py f: return x < 1 -> return x < 2', \
'a.py f: return x < 1 -> return x < 0']
    """
    text = _Text(source)
    seen: Counter[tuple[str, str, str]] = Counter()
    found = []
    for function, scope, statement, node, new in _changes(ast.parse(source), text):
        start, end = text.span(node)
        first, last = text.header(statement)
        was, now = _around(text.bytes[first:last], start - first, end - first, new.encode())
        changed = (text.bytes[:start] + new.encode() + text.bytes[end:]).decode()
        seen[function, was, now] += 1
        is_default = isinstance(statement, ast.FunctionDef)
        lines = range(0) if is_default else range(text.line(first) - scope.first, text.line(last - 1) - scope.first + 1)
        found.append(Mutant(file, function, was, now, seen[function, was, now], text.line(start), scope, lines, changed))
    return found


class _Text:
    """A source by positions, which `ast` gives in bytes."""

    def __init__(self, source: str) -> None:
        self.bytes = source.encode()
        self.lines = [0, *(i + 1 for i, byte in enumerate(self.bytes) if byte == ord("\n"))]

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.lines[node.lineno - 1] + node.col_offset, self.lines[node.end_lineno - 1] + node.end_col_offset

    def line(self, position: int) -> int:
        return self.bytes[:position].count(b"\n") + 1

    def header(self, statement: ast.stmt) -> tuple[int, int]:
        """Return where a statement is, without the block below it."""
        start, end = self.span(statement)
        body = getattr(statement, "body", None)
        return start, self.bytes[: self.span(body[0])[0]].rindex(b":") + 1 if body else end

    def of(self, node: ast.expr) -> str:
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def operand(self, node: ast.expr) -> str:
        """Return a part of an expression with the parentheses that `ast` leaves out."""
        return f"({self.of(node)})" if isinstance(node, LOOSE) else self.of(node)


def _around(statement: bytes, start: int, end: int, new: bytes) -> tuple[str, str]:
    """Return a statement before and after a change on one line, shortened far from it."""
    before, after = (" ".join(part.decode().split()) for part in (statement[:start], statement[end:]))
    left = " " if statement[:start].endswith((b" ", b"\n")) and before else ""
    before = before if len(before) <= CONTEXT else "…" + before[-CONTEXT:]
    after = after if len(after) <= CONTEXT else after[:CONTEXT] + "…"
    right = " " if statement[end:].startswith((b" ", b"\n")) and after else ""
    middles = (" ".join(part.decode().split()) for part in (statement[start:end], new))
    was, now = (f"{before}{left}{middle}{right}{after}".strip() for middle in middles)
    return (was if len(was) <= 6 * CONTEXT else was[: 6 * CONTEXT] + "…"), now


Change = tuple[str, Scope, ast.stmt, "ast.expr | ast.stmt", str]  # function, scope, statement, node, what replaces the node


def _changes(tree: ast.Module, text: _Text) -> Iterator[Change]:
    for statement in tree.body:
        yield from _in_statement(statement, "", None, text)


def _in_statement(statement: ast.stmt, function: str, scope: Scope | None, text: _Text) -> Iterator[Change]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        if statement.name in TEXTS:
            return
        name = f"{function}.{statement.name}".removeprefix(".")
        if isinstance(statement, ast.FunctionDef):
            scope = scope or scope_of(statement, name)
            for default in (*statement.args.defaults, *statement.args.kw_defaults):
                if default is not None:
                    yield from ((name, scope, statement, *change) for change in _in_expression(default, text))
        for inner in statement.body:
            yield from _in_statement(inner, name, scope, text)
        return
    here = scope or scope_of(statement, "")
    yield from ((function, here, statement, *change) for change in _of_statement(statement, text))
    for expression in _expressions(statement):
        yield from ((function, here, statement, *change) for change in _in_expression(expression, text))
    for inner in _blocks(statement):
        yield from _in_statement(inner, function, scope, text)


def _blocks(statement: ast.stmt) -> Iterator[ast.stmt]:
    if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
        return
    for name in ("body", "orelse", "finalbody"):
        yield from getattr(statement, name, ())
    for handler in getattr(statement, "handlers", ()):
        yield from handler.body


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the expressions of a statement in which faults are planted."""
    match statement:
        case ast.Return(value=ast.expr() as value) | ast.Expr(value=value) | ast.AugAssign(value=value):
            yield value
        case ast.Assign(targets=targets, value=value):
            yield from targets
            yield value
        case ast.AnnAssign(annotation=annotation, value=ast.expr() as value) if "TypeAlias" not in ast.unparse(annotation):
            yield value
        case ast.If(test=test) | ast.While(test=test) if ast.unparse(test) != "TYPE_CHECKING":
            yield test
        case ast.For(iter=iterable):
            yield iterable
        case ast.With(items=items):
            yield from (item.context_expr for item in items)


def _of_statement(statement: ast.stmt, text: _Text) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield what may become of a statement as a whole."""
    match statement:
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant) and not _is_error(value):
            yield statement, "return None"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break():
            yield statement, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield statement, "pass"
        case ast.If(test=test) | ast.While(test=test) if ast.unparse(test) != "TYPE_CHECKING":
            yield from _negated(test, text)
        case ast.With(items=items):
            for item in items:
                if item.optional_vars is None:
                    yield item.context_expr, "__import__('contextlib').nullcontext()"


def _negated(test: ast.expr, text: _Text) -> Iterator[tuple[ast.expr, str]]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return  # the `not` is left out below
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1):  # another comparison does it
        yield test, f"not ({text.of(test)})"


def _in_expression(node: ast.expr, text: _Text) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield the places of an expression and what may stand there."""
    if isinstance(node, ast.JoinedStr) or _is_text(node):
        return
    yield from _of_expression(node, text)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.comprehension):
            yield from _in_expression(child.iter, text)
            for test in child.ifs:
                yield from _negated(test, text)
                yield from _in_expression(test, text)
        elif isinstance(child, ast.keyword):
            yield from _in_expression(child.value, text)
        elif isinstance(child, ast.expr):
            yield from _in_expression(child, text)


def _of_expression(node: ast.expr, text: _Text) -> Iterator[tuple[ast.expr, str]]:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=right):
            sides = [text.operand(side) for side in (left, *right)]
            signs = [SIGNS[type(op)] for op in ops]
            for i, sign in enumerate(signs):
                changed = [*signs[:i], OTHER_SIGN[sign], *signs[i + 1 :]]
                yield node, " ".join([sides[0], *(part for pair in zip(changed, sides[1:], strict=True) for part in pair)])
        case ast.BoolOp(op=op, values=values):
            yield node, (" or " if isinstance(op, ast.And) else " and ").join(f"({text.of(value)})" for value in values)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield node, f"({text.of(operand)})"
        case ast.BinOp(left=left, op=ast.BitOr(), right=right) if not _is_type(right):
            yield node, f"({text.of(left)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC and not (_is_string(left) or _is_string(right)):
            yield node, f"({text.of(left)}) {ARITHMETIC[type(op)]} ({text.of(right)})"
        case ast.Constant(value=bool() as value):
            yield node, str(not value)
        case ast.Constant(value=int() | float() as value):
            yield node, repr(value + 1)
            if isinstance(value, int):
                yield node, repr(value - 1)
        case ast.IfExp(test=test):
            yield from _negated(test, text)
        case ast.Call(func=ast.Name(id=name) as func) if name in SWAPPED:
            yield func, SWAPPED[name]
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[only], keywords=[]) if name in WRAPPERS:
            if not isinstance(only, ast.GeneratorExp | ast.Starred):
                yield node, f"({text.of(only)})"
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=[]) if name in COPIES:
            yield node, f"({text.of(value)})"
        case ast.Subscript(value=value, slice=ast.Slice(lower=lower, upper=upper, step=None)):
            if lower is not None:
                yield node, f"{text.operand(value)}[:{text.of(upper) if upper else ''}]"
            if upper is not None:
                yield node, f"{text.operand(value)}[{text.of(lower) if lower else ''}:]"


def _is_text(node: ast.expr) -> bool:
    """Errors and warnings are for people."""
    return _is_error(node) or (
        isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "_differs", "three_lines")
    )


def _is_error(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error")


def _is_string(node: ast.expr) -> bool:
    """A path or a text; arithmetic on it raises at once."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_type(node: ast.expr) -> bool:
    name = ast.unparse(node).rpartition(".")[2]
    return name[:1].isupper() or name in ("int", "float", "str", "list", "tuple", "dict", "bool", "bytes", "None")
