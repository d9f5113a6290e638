"""A small part of the matrix, and that it sees what is wrong."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.matrix import record, running
from tests.matrix.cells import ABSENT, BAD, CRASHED, REFUSED, STUDENTS, WORKS, WRONG, Student, Trials
from tests.matrix.entries import Entry, all_entries
from tests.matrix.record import Running

SMALL = [
    "transformers llama",
    "transformers gemma3",
    "transformers gpt_neox (Pythia)",
    "transformers esm (ESM-2)",
    "transformers clip, vision",
    "transformers t5, decoder",
    "transformers bart, cross-attention",
    "timm vit (DINOv3)",
    "timm swin",
    "diffusers DiT",
    "torch MultiheadAttention, padding",
    "plain nanoGPT",
]
TRIED = ("Reinit", "Softmax", "LinearAttention", "SlidingWindow", "NarrowMlp", "Span, OneLayer")


@pytest.fixture(autouse=True)
def quiet():
    """Leave out what packages warn about, and torch's fast path, as the command does."""
    with warnings.catch_warnings():
        fast = torch.backends.mha.get_fastpath_enabled()
        running.quiet()
        yield
        torch.backends.mha.set_fastpath_enabled(fast)


@pytest.mark.parametrize("name", SMALL)
def test_nothing_is_silently_wrong_and_what_worked_works(name):
    (known,) = [entry["cells"] for entry in record.kept()[1] if entry["entry"] == name]
    trials = Trials(all_entries()[name])
    found = {student.name: trials.run(student) for student in STUDENTS if student.name in TRIED}
    assert {student: cell for student, cell in found.items() if cell["outcome"] in BAD} == {}
    assert {student: cell for student, cell in found.items() if cell["outcome"] == REFUSED and known[student] != REFUSED} == {}
    assert any(cell["outcome"] == WORKS for cell in found.values())


NANO = "plain nanoGPT"


def outcome(student: Student) -> tuple[str, str]:
    found = Trials(all_entries()[NANO]).run(student)
    return found["outcome"], found["detail"]


class Averaging(nn.Module):
    """Attention that forgets to be causal."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.inner = copy.deepcopy(teacher)

    def forward(self, x):
        return self.inner(x) + x.mean(1, keepdim=True)


class Unfaithful(nn.Module):
    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.inner = copy.deepcopy(teacher)

    def forward(self, x):
        return 1.01 * self.inner(x)


class Breaking(Unfaithful):
    def forward(self, x):
        if self.training:
            raise RuntimeError("no training here")
        return self.inner(x)


def made(kind):
    return lambda _: lambda teacher, site: kind(teacher)


@pytest.fixture
def without_reload(monkeypatch):
    """A user's own student must be given again to be loaded."""
    monkeypatch.setattr(Trials, "_reload", lambda *_: None)


@pytest.mark.usefixtures("without_reload")
def test_a_student_that_reads_the_future_is_silently_wrong():
    found, said = outcome(Student("Averaging", "attention", made(Averaging)))
    assert found == WRONG
    assert "a later token changes earlier outputs" in said


def test_a_student_that_should_equal_its_teacher_and_does_not_is_silently_wrong():
    found, said = outcome(Student("Unfaithful", "mlp", made(Unfaithful), made(Unfaithful)))
    assert found == WRONG
    assert "does not equal its teacher: off by 0.0" in said


def test_an_error_after_the_first_forward_is_a_crash_with_its_place():
    found, said = outcome(Student("Breaking", "mlp", made(Breaking)))
    assert found == CRASHED
    assert said.startswith("RuntimeError: no training here (matrix/test_matrix.py:")


def test_a_student_that_has_no_place_is_not_applicable():
    entry = Entry("without attention", all_entries()[NANO].build, all_entries()[NANO].batch)
    assert Trials(entry).run(STUDENTS[1]) == {"outcome": ABSENT}


def cells_one_of_which_ends_the_process(entry: str, students: list[str], path: Path) -> None:
    for student in students:
        if student == "Softmax":
            os._exit(3)
        Running(path).add({"entry": entry, "student": student, "outcome": ABSENT})


@pytest.mark.processes
def test_a_cell_that_ends_its_process_is_recorded_and_the_others_go_on(tmp_path):
    file = Running(tmp_path / "record.jsonl")
    file.begin(fresh=False)
    line = running.run_entry("a model", ["Reinit", "Softmax", "RmsNorm"], file, cells_one_of_which_ends_the_process)
    cells = {cell["student"]: cell for cell in file.read()[1]}
    assert cells["Softmax"]["detail"] == "the process ended with 3. "
    assert [cell["outcome"] for cell in cells.values()] == [ABSENT, CRASHED, ABSENT]
    assert "1 crashed" in line


def test_a_run_continues_unless_the_code_or_a_package_is_another(tmp_path, monkeypatch):
    file = Running(tmp_path / "record.jsonl")
    cell = {"entry": "a", "student": "b", "outcome": WORKS}
    file.begin(fresh=False)
    file.add(cell)
    file.begin(fresh=False)
    assert file.read()[1] == [cell]
    monkeypatch.setattr(record, "versions", lambda: {"torch": "another"})
    file.begin(fresh=False)
    assert file.read()[1] == []
