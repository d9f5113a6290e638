"""The record of the last run is complete, and the pages say what it says."""

from __future__ import annotations

import pytest

from tests.helpers.processes import ROOT
from tests.matrix import page, record
from tests.matrix.cells import BAD, OUTCOMES, REFUSED, STUDENTS, WORKS
from tests.matrix.entries import all_entries


def test_the_record_is_complete_and_nothing_is_silently_wrong():
    head, entries = record.kept()
    assert {entry["entry"] for entry in entries} == set(all_entries())
    assert len(entries) >= 100
    assert all(set(entry["cells"]) == {student.name for student in STUDENTS} for entry in entries)
    cells = page.flattened(entries)
    assert {cell["outcome"] for cell in cells} <= set(OUTCOMES) - set(BAD)
    assert set(head["versions"]) == {"python", *record.PACKAGES}


def test_the_page_is_that_of_the_record():
    assert (ROOT / "docs" / "models.md").read_text(encoding="utf-8") == page.text(*record.kept())


def test_readme_and_operators_say_the_measured_share():
    _, entries = record.kept()
    said = page.kept_share(entries)
    for file in ("README.md", "docs/operators.md"):
        assert said in (ROOT / file).read_text(encoding="utf-8")


def test_entries_that_are_run_again_replace_those_of_the_record(tmp_path):
    file = tmp_path / "record.jsonl"
    head, cells = {"code": "old", "versions": {}}, [("a", WORKS), ("b", REFUSED)]

    def found(code: str, *outcomes: tuple[str, str]):
        every = [
            {"entry": entry, "student": student.name, "outcome": outcome, "detail": ""}
            for entry, outcome in outcomes
            for student in STUDENTS
        ]
        return {**head, "code": code}, every, {entry: True for entry, _ in outcomes}

    record.keep(file, *found("old", *cells))
    record.renew(file, *found("new", ("b", WORKS)))
    first, (a, b) = record.kept(file)
    assert (first, a.get("code"), b["code"]) == (head, None, "new")
    assert {*a["cells"].values(), *b["cells"].values()} == {WORKS}
    with pytest.raises(SystemExit, match="run all of it"):
        record.renew(file, {**head, "versions": {"torch": "another"}}, [], {})
