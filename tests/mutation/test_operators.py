"""The faults that are planted, and those that are not."""

import ast
from pathlib import Path

import pytest

import segue
from tests.mutation.__main__ import sample
from tests.mutation.operators import functions_of, mutants_of

PACKAGE = Path(segue.__file__).parent


def planted(source: str) -> list[str]:
    return [mutant.source.removeprefix("def f():\n").strip() for mutant in mutants_of("a.py", source)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("if a is None: b()", ["if a is not None: b()", "if a is None: pass"]),
        ("if a: b()", ["if not (a): b()", "if a: pass"]),
        ("a = not b", ["a = (b)"]),
        ("a = b and c", ["a = (b) or (c)"]),
        ("a = b < c <= d", ["a = b <= c <= d", "a = b < c < d"]),
        ("a = b + 1", ["a = (b) - (1)", "a = b + 2", "a = b + 0"]),
        ("a = b | c", ["a = (b)"]),
        ("a = True", ["a = False"]),
        ("a = max(b, c)", ["a = min(b, c)"]),
        ("a = b.detach()", ["a = (b)"]),
        ("a = b[c:d]", ["a = b[:d]", "a = b[c:]"]),
        ("a.b = c", ["pass"]),
        ("return a", ["return None"]),
        ("raise a", ["pass"]),
        ("with a, b as c: d", ["with __import__('contextlib').nullcontext(), b as c: d"]),
        ("a = [b for b in c if b]", ["a = [b for b in c if not (b)]"]),
    ],
)
def test_one_place_changes_at_a_time(line, expected):
    assert planted(f"def f():\n    {line}") == expected


@pytest.mark.parametrize(
    "code",
    [
        'def f():\n    """Return 1 + 1."""',
        "def f(a: int | None) -> 'Literal[1]': ...",
        "def f():\n    assert a > 1",
        "def f():\n    return ValueError(1 + 1)",
        "class A:\n    def __repr__(self):\n        return a + b",
        "if TYPE_CHECKING:\n    a = 1",
        "@lru_cache(maxsize=1)\ndef f(): ...",
        "A: TypeAlias = B[1]",
        "a = f'{b + 1}'",
    ],
)
def test_texts_and_types_are_left_alone(code):
    assert planted(code) == []


def test_a_default_is_a_place_too():
    assert planted("def f(a=1): ...") == ["def f(a=2): ...", "def f(a=0): ..."]


def test_an_operand_keeps_its_parentheses():
    assert planted("a = (b := c) in d") == ["a = (b := c) not in d"]
    assert planted("a = (b if c is d else e)[1:]")[0] == "a = (b if c is d else e)[:]"


@pytest.mark.parametrize("file", ["core/seam.py", "checkpoint/folders.py", "schedules.py"])
def test_every_mutant_of_a_file_is_valid_code_under_a_name_of_its_own(file):
    source = (PACKAGE / file).read_text(encoding="utf-8")
    mutants = mutants_of(file, source)
    assert len({mutant.key for mutant in mutants}) == len(mutants) > 50
    for mutant in mutants:
        ast.parse(mutant.source)
    scopes = {scope.digest for scope in functions_of(source)}
    assert all(mutant.scope.digest in scopes for mutant in mutants if mutant.scope.name)


def test_an_edit_keeps_the_sample_of_all_it_does_not_touch():
    parts = [f"def f{i}(a):\n    return a + {i}\n\n\n" for i in range(40)]
    before, after = ({"a.py": mutants_of("a.py", "".join(source))} for source in (parts, parts[1:]))
    chosen, again = ({mutant.key for mutant in sample(files, 30, seed=0)} for files in (before, after))
    assert len(chosen) == len(again) == 30
    assert {key for key in chosen if "a.py f0:" not in key} <= again
