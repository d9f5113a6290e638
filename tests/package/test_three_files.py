"""Adding a gate, a method or an operator touches three files: code, test, card.

A copy of the repository gets one of each, in exactly three files, and the tests that react run there: contracts, references,
cards and the documentation site.
"""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.helpers.processes import run_python

ROOT = Path(__file__).parents[2]
COPIED = (
    "src",
    "tests",
    "docs",
    "examples",
    "experiments",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "mkdocs.yml",
    "pyproject.toml",
    "Makefile",
)

GATE = {
    "src/segue/gates.py": '''

@dataclass(frozen=True, kw_only=True)
class Squared:
    """Let the student in slowly at first: (1 - alpha) squared."""

    def __call__(self, alpha: float, noise: Noise | None) -> float:
        return (1.0 - alpha) ** 2
''',
    "tests/vocabulary/test_gates.py": """

def test_squared_is_below_blend():
    from segue.gates import Squared

    assert Squared()(0.5, None) == 0.25
""",
    "docs/cards/gates.md": "\n## Squared\n\n`weight = (1 - alpha)²`\n",
}
METHOD = {
    "src/segue/methods.py": '''

@method(label="Slow DCR")
def slow_dcr(sites: Selector, **settings: Unpack[PlanKeywords]) -> Plan:
    """DCR that begins at one half."""
    return _plan(sites, settings, schedule=aggr20(start=0.5))
''',
    "tests/vocabulary/test_methods.py": """

def test_slow_dcr_begins_at_one_half():
    assert segue.methods.slow_dcr(sites="x").schedule(0.0, SITE) == 0.5
""",
    "docs/cards/slow_dcr.md": "# `slow_dcr`\n\nDCR that begins at one half: `segue.methods.slow_dcr(sites=...)`.\n",
}
OPERATOR = {
    "src/segue/students/attention/mixers/mean.py": '''"""Mean: every token gets the mean of the values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from segue.students.attention.mixer import Mixer, repeat_heads
from segue.students.attention.module import Operator
from segue.students.attention.spec import AttentionSpec

__all__ = ["Mean"]


class MeanMixer(Mixer):
    """The mean of the values, padding left out."""

    uses = ("value",)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None, causal: bool) -> Tensor:
        count = v.shape[2] if token_mask is None else token_mask.sum(1).clamp_min(1)[:, None, None, None]
        return (repeat_heads(v, q.shape[1]).sum(2, keepdim=True) / count).expand_as(q)


@dataclass(frozen=True, kw_only=True)
class Mean(Operator):
    """The mean of the values."""

    cost = "n d"
    paper = "https://example.org"
    mixer_class = MeanMixer

    def mixer(self, spec: AttentionSpec) -> Mixer:
        return MeanMixer()
''',
    "tests/students/attention/mixers/test_mean.py": '''"""Mean: its settings and its formula."""

from segue.students import Mean
from tests.students.attention.mixers.formulas import prepared

SETTINGS = {"mean": Mean()}


def naive(operator, spec, mixer, q, k, v, token_mask, causal):
    """Average the values of the tokens that count."""
    _, v, _, seen = prepared(q, k, v, token_mask, causal)
    weights = seen.to(v.dtype)
    return weights / weights.sum(-1, keepdim=True).clamp_min(1) @ v
''',
    "docs/cards/Mean.md": "# `Mean`\n\nThe mean of the values: `segue.students.Mean()`.\n",
}
REACTING = [
    "tests/contracts",
    "tests/vocabulary/test_gates.py",
    "tests/vocabulary/test_methods.py",
    "tests/vocabulary/test_settings.py",
    "tests/docs/test_cards.py",
    "tests/docs/test_site.py",
    "tests/students/attention/test_mixer.py",
    "tests/students/attention/mixers/test_mean.py",
    "tests/golden",
]


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


@pytest.mark.slow
@pytest.mark.processes
def test_code_test_and_card_are_enough(tmp_path, record_property):
    for name in COPIED:
        place = ROOT / name
        (shutil.copytree if place.is_dir() else shutil.copy)(place, tmp_path / name)
    for what, files in {"a gate": GATE, "a method": METHOD, "an operator": OPERATOR}.items():
        record_property("figure", f"Files to touch for {what}: {len(files)} (3 is the aim)")
        assert len(files) == 3
        for name, text in files.items():
            _append(tmp_path / name, text)
    gates = tmp_path / "src/segue/gates.py"
    gates.write_text(gates.read_text(encoding="utf-8").replace("__all__ = [", '__all__ = ["Squared", '), encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path / "src"), str(tmp_path)])
    chosen = "Squared or squared or slow_dcr or mean or Mean or site or card or test_they_were_found"
    command = ("-m", "pytest", "-p", "no:cacheprovider", "-x", "-vv", *REACTING, "-k", chosen)
    done = run_python(*command, cwd=tmp_path, env={"PYTHONPATH": paths})
    for name in ("Squared", "slow_dcr", "Mean", "test_site"):  # none of them was passed over
        assert re.search(rf"{name}.* PASSED", done.stdout), name
