"""A finalized model leaves PyTorch: by torch.export and to ONNX, as the record says that docs/models.md is made of."""

from __future__ import annotations

import pytest

import segue
from segue.students.attention.module import Operator
from tests.matrix import export
from tests.matrix.cells import WORKS
from tests.matrix.entries import all_entries

STUDENTS = {student.name: student for student in export.TRIED}
RECORD = export.kept()["students"]


def operators() -> list[str]:
    found = {name: getattr(segue.students, name) for name in segue.students.names()}
    return [name for name, made in found.items() if isinstance(made, type) and issubclass(made, Operator)]


def test_the_record_has_every_student_and_torch_export_takes_all_of_them():
    assert {*operators()} <= {*RECORD} == {*STUDENTS}
    found = [cells["export"] for kinds in RECORD.values() for cells in kinds.values()]
    assert {*found} <= {WORKS, "refused", "not applicable"}
    assert all(any(cells["export"] == WORKS for cells in kinds.values()) for kinds in RECORD.values())
    assert not [text for kinds in RECORD.values() for cells in kinds.values() for text in cells.values() if "off by" in text]


@pytest.mark.slow
@pytest.mark.parametrize("kind", export.MODELS)
@pytest.mark.parametrize("name", operators())
def test_an_operator_is_exported_as_the_record_says(name, kind):
    """`python -m tests.matrix.export` renews the record."""
    assert export.cell(all_entries()[export.MODELS[kind]], STUDENTS[name]) == RECORD[name][kind]
