"""The rooms of the package: each imports from its own room and from those before it."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "segue"
VOCABULARY = {
    "sites",
    "gates",
    "schedules",
    "losses",
    "similarity",
    "methods",
    "errors",
    "plan",
    "settings",
    "border",
    "phases",
    "display",
}
ORDER = (
    "vocabulary",
    "students",
    "core",
    "checkpoint",
    "training",
    "reporting",
    "diagnostics",
    "planning",
    "integrations",
    "data",
    "convert",
    "lab",
    "cli",
)
DECLARED = {("plan", "students")}  # a plan without a student takes students.Reinit()
DOORS = {"__init__", "__main__"}  # the public names, and `python -m segue`


def test_packages_import_from_themselves_or_from_those_before():
    level = {room: i for i, room in enumerate(ORDER)} | dict.fromkeys(VOCABULARY, 0)
    wrong = set()
    for path in SOURCE.rglob("*.py"):
        place = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if place not in DOORS:
            wrong |= {(place, room) for room in imported(path) if level[room] > level[place]}
    assert wrong == DECLARED


def test_the_root_holds_the_vocabulary_and_nothing_else():
    modules = {path.stem for path in SOURCE.glob("*.py")}
    assert modules - DOORS <= VOCABULARY
    assert len(modules) <= 15
    assert {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()} == {*ORDER} - {"vocabulary"}


def imported(path: Path) -> set[str]:
    """Return the rooms and root modules that a file imports, inside functions too; what only type checkers read is left out."""
    found = set()
    for node in walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "segue":
            found |= {public(alias.name) for alias in node.names if alias.name != "__version__"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= second(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {room for alias in node.names for room in second(alias.name)}
    return found


def walk(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from walk(child)


def second(module: str) -> set[str]:
    """Return the part after `segue.`, if there is one.

    >>> second("segue.core.seam"), second("torch.nn")
    ({'core'}, set())
    """
    package, _, rest = module.partition(".")
    return {rest.partition(".")[0]} if package == "segue" and rest else set()


def public(name: str) -> str:
    """Return the room of a name that `segue` itself offers: `Plan` is in `plan`."""
    import segue

    return segue._MODULE_OF.get(name, name).partition(".")[0]
