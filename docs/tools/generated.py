"""Write into the site what the code already says: the navigation of cards, the API reference, tables.

A page asks by a comment, and nobody keeps a list by hand:

`<!-- api: segue.gates -->`         every public name of a module, from its docstring and signature
`<!-- table: methods -->`           the methods, with what each one sets
`<!-- table: operators -->`         the operators, with what each one costs
`<!-- table: words -->`             Segue's own words, as how-it-works.md defines them
`<!-- claims: In the first | With -->`  the rows of claims.md that begin so, with their outcomes
`<!-- measured: window | Sliding window -->`    an operator's rows in performance.md and the log of November 2026
"""

from __future__ import annotations

import ast
import re
from importlib import import_module
from inspect import getsource
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

import segue

DOCS = Path(__file__).parents[1]
REQUEST = re.compile(r"<!-- (api|table|measured|claims): (.+?) -->", re.DOTALL)
SPEED = "| mixer | exponent, forward |"
CLAIM = ("claim", "where", "tested by", "outcome", "measured")
WORDS = "| word | meaning |"
RECOVERED = "| operator | Student only |"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the navigation of the cards from the folder."""
    for section in config.nav or []:
        if "Cards" in section:
            section["Cards"] = _cards()
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Answer every request of a page."""
    answers = {"api": api, "table": lambda what: table(what, page.file.src_uri), "measured": measured, "claims": claims}
    return REQUEST.sub(lambda match: answers[match[1]](match[2]), markdown)


def api(name: str) -> str:
    """Ask mkdocstrings for every public name of a module."""
    module = import_module(name)
    return "\n".join(f"::: {place}\n    options:\n      heading_level: 3\n{_bases(place)}" for place in public_places(module))


def _bases(place: str) -> str:
    private = any(base.__name__.startswith("_") for base in getattr(resolve_name(place), "__bases__", ()))
    return "      show_bases: false\n" if private else ""


def public_places(module: ModuleType) -> list[str]:
    """Return where each public name of a module is defined: those of `__all__`, or all in the order of the file."""
    places = []
    for name in getattr(module, "__all__", None) or _defined(module):
        origin = getattr(getattr(module, name), "__module__", "") or ""  # of an alias such as `Gate`: its type's module
        places.append(f"{origin if origin.startswith('segue.') else module.__name__}.{name}")
    return places


def table(what: str, page: str) -> str:
    """Return a table that the package makes of its own parts, for a page."""
    cards = "" if page.startswith("cards/") else "cards/"
    if what == "operators":
        return _operators(cards)
    if what == "words":
        return _written(_table(DOCS / "how-it-works.md", WORDS))
    return re.sub(r"^\| `(\w+)` \|", rf"| [`\1`]({cards}\1.md) |", segue.methods.table(), flags=re.MULTILINE)


def measured(rows: str) -> str:
    """Return the rows of one operator: of mixers in performance.md, of operators in the log of November 2026."""
    mixer, _, operator = (part.strip() for part in rows.partition("|"))
    headings, *lines = _table(DOCS / "performance.md", SPEED)
    text = "Time against tokens, compared with torch's fused softmax ([performance](../performance.md#mixers) says how):\n\n"
    text += _written([headings, *(line for line in lines if line[0].split(", ")[0] == mixer)])
    if operator:
        headings, *lines = _table(DOCS / "lab-log-2026-11.md", RECOVERED)
        text += "\nPart of the teacher's accuracy that the students alone recover, on digits in 200 steps, two seeds "
        text += "([log](../lab-log-2026-11.md#seven-operators-in-place-of-attention)):\n\n"
        text += _written([headings, *(line for line in lines if line[0] == operator)])
    return text


def claims(beginnings: str) -> str:
    """Return claims with their outcomes, so that a page says no more than what was judged; each must exist."""
    text = (DOCS / "claims.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    found = [["claim", "outcome", "measured"]]
    for beginning in (" ".join(part.split()) for part in beginnings.split("|")):
        matching = [row for row in rows if row[0].startswith(beginning) and len(row) == len(CLAIM)]
        if len(matching) != 1:
            raise ValueError(f"{len(matching)} claims of claims.md begin with {beginning!r}")
        found.append([matching[0][CLAIM.index(name)] for name in found[0]])
    return _written(found)


def _cards() -> list[object]:
    """Return the overview, then the cards of methods and operators in the order of the code, then the pages of many."""
    methods, operators = list(segue.methods.ALL), list(operator_names())
    others = sorted(path.stem for path in (DOCS / "cards").glob("*.md") if path.stem not in {"README", *methods, *operators})
    return [
        "cards/README.md",
        {"Methods": [{name: f"cards/{name}.md"} for name in methods]},
        {"Operators": [{name: f"cards/{name}.md"} for name in operators]},
        *({name.capitalize(): f"cards/{name}.md"} for name in others),
    ]


def operator_names() -> list[str]:
    """Return the names of all attention operators."""
    from segue.students.attention.module import Operator

    found = {name: getattr(segue.students, name) for name in segue.students.__all__}
    return [name for name, made in found.items() if isinstance(made, type) and issubclass(made, Operator)]


def _operators(cards: str) -> str:
    rows = [["operator", "in one line", "cost", "causal", "cross", "of its teacher's softmax", "keeps while generating"]]
    for name in operator_names():
        operator = getattr(segue.students, name)
        line = (operator.__doc__ or "").splitlines()[0]
        mixer = operator.mixer_class
        keeps = "a state" if mixer.recurrent else "all keys and values" if mixer.supports_causal else "-"
        causal, cross = ("yes" if answer else "no" for answer in (mixer.supports_causal, mixer.supports_cross))
        kept = "bias, cap, sinks, any mask" if "bias" in mixer.honours else "-"
        rows.append([f"[`{name}`]({cards}{name}.md)", line, operator.cost, causal, cross, kept, keeps])
    return _written(rows)


def _defined(module: ModuleType) -> list[str]:
    """Return classes, functions and annotated names (contracts such as `Gate`) in the order of a file."""
    names = []
    for node in ast.parse(getsource(module)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    return [name for name in names if not name.startswith("_")]


def _table(page: Path, first: str) -> list[list[str]]:
    """Return the cells of the table that begins with these headings."""
    text = page.read_text(encoding="utf-8")
    lines = text[text.index(first) :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("|---")]


def _written(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
