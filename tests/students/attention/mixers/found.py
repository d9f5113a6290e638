"""Every operator, found in its folder, with the settings and the naive reference that its test file declares.

`tests/students/attention/mixers/test_<file>.py` defines
- `SETTINGS`, the operator with settings that suit single mixers, by the names of the tests;
- `naive(operator, spec, mixer, q, k, v, token_mask, causal)`, the formula in float64;
and where the defaults below do not suit it
- `IN_MODELS`, settings for sequences of 7 to 17 tokens; by default the first of `SETTINGS`, under the operator's name;
- `STATE_DICT`, the shapes that a mixer of `checks.attention_spec()` saves; by default nothing;
- `SLACK`, how many times the tolerance of `checks` its arithmetic needs;
- `ROWS`, what stands in the table of docs/operators.md; by default the operator with its defaults.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from segue import students
from segue.students.attention.module import Operator

KINDS: list[type[Operator]] = [
    kind for name in students.__all__ if isinstance(kind := getattr(students, name), type) and issubclass(kind, Operator)
]


def _test_of(kind: type[Operator]) -> ModuleType:
    return import_module(f"{__package__}.test_{kind.__module__.rpartition('.')[2]}")


SETTINGS: dict[str, Operator] = {}
IN_MODELS: dict[str, Operator] = {}
ONE_OF_EACH: list[str] = []  # the first name in SETTINGS of every operator
ROWS: list[Operator] = []
for _kind in KINDS:
    _test = _test_of(_kind)
    _first = next(iter(_test.SETTINGS))
    SETTINGS |= _test.SETTINGS
    IN_MODELS |= getattr(_test, "IN_MODELS", {_kind.__name__: _test.SETTINGS[_first]})
    ROWS += getattr(_test, "ROWS", [_kind()])
    ONE_OF_EACH.append(_first)

CAUSAL = [name for name, operator in SETTINGS.items() if operator.mixer_class.supports_causal]
RECURRENT = [name for name, operator in SETTINGS.items() if operator.mixer_class.recurrent]


def declared(operator: Operator, name: str, default: Any = None) -> Any:
    """Return what the operator's test file declares under a name."""
    return getattr(_test_of(type(operator)), name, default)
