"""Names that a shell completes, read from the source: importing the modules would take torch's seconds for every Tab."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
Names = Callable[[], list[str]]


def methods() -> list[str]:
    """Return the methods: functions with the decorator `@method(...)`.

    >>> methods()[:2]
    ['student_only', 'distillation']
    """
    functions = [node for node in _tree("methods.py").body if isinstance(node, ast.FunctionDef)]
    return [node.name for node in functions if any(name == "method" for name, _ in _calls(node.decorator_list))]


def variants() -> list[str]:
    """Return the methods and the variants that only the lab has."""
    made = [given[0] for name, given in _calls(ast.walk(_tree("lab/variants.py"))) if name == "Variant"]
    return [*methods(), *(str(name.value) for name in made if isinstance(name, ast.Constant))]


def students() -> list[str]:
    """Return the student factories: public classes below `segue.students` that are called with (teacher, site).

    >>> "Reinit" in students()
    True
    """
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((PACKAGE / "students").rglob("*.py"))]
    public = {name for tree in trees for name in _listed(tree)}
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def takes_a_teacher(name: str) -> bool:
        if name not in classes:
            return False
        calls = (part for part in classes[name].body if isinstance(part, ast.FunctionDef) and part.name == "__call__")
        own = next(calls, None)
        if own is not None:
            return [one.arg for one in own.args.args[1:]] == ["teacher", "site"]
        return any(takes_a_teacher(base.id) for base in classes[name].bases if isinstance(base, ast.Name))

    return sorted(name for name in public & classes.keys() if takes_a_teacher(name))


COMPLETIONS: dict[str, Names] = {"method": methods, "student": students, "candidates": students}


def completion(names: Names) -> Callable[[str], list[str]]:
    """Complete the last of several names, as in 'LinearAttention; Slid'."""

    def complete(incomplete: str) -> list[str]:
        before, separator, begun = incomplete.rpartition(";")
        lead = before + separator + begun[: len(begun) - len(begun.lstrip())]
        return [lead + name for name in names() if name.startswith(begun.strip())]

    return complete


def _calls(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, list[ast.expr]]]:
    """Yield the calls of plain names, with their arguments by position."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, node.args


def _listed(tree: ast.Module) -> list[str]:
    """Return the `__all__` of a module, where it is written out."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(one, ast.Name) and one.id == "__all__" for one in node.targets):
            return [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return []


def _tree(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
