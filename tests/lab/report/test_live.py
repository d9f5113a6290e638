"""The live report: served on this machine alone, it follows runs that are under way, and writes nothing."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from segue.cli.report import watching
from segue.errors import ConfigError
from segue.lab.report.live import Live, read_under_way, server
from segue.reporting import records
from segue.reporting.records import Result
from tests.lab.report.saved_runs import changed, grid, run, save

SETTINGS: dict[str, Any] = {"evaluations": 6, "sites": 2}


def begin(result: Result, folder: Path, evaluations: int) -> None:
    """Write a run as it is while it trains: what is known at its start, and its first evaluations."""
    records.write_begun(changed(result, points=[], final={}, seconds=0.0, flops=0.0), folder)
    (folder / "metrics.jsonl").write_text("")
    go_on(result, folder, 0, evaluations)


def go_on(result: Result, folder: Path, first: int, last: int) -> None:
    with (folder / "metrics.jsonl").open("a") as log:
        for point in result.train_info.points[first:last]:
            log.write(json.dumps({name: value for name, value in asdict(point).items() if value not in (None, {}, [])}) + "\n")


def end(result: Result, folder: Path) -> None:
    records.write(result, folder)
    (folder / records.BEGUN).unlink()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    made, _ = server(Live(tmp_path))
    threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
    yield tmp_path, made.server_address[1]
    made.shutdown()
    made.server_close()


def asked(port: int, path: str, **headers: str) -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers["ETag"]


def test_runs_under_way_are_read_up_to_the_line_that_is_being_written(tmp_path: Path):
    whole = run(**SETTINGS)
    begin(whole, tmp_path / "dcr", 3)
    with (tmp_path / "dcr" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 600, "epoch": 3')
    (found,) = read_under_way(tmp_path)
    assert [point.step for point in found.train_info.points] == [0, 200, 400]
    assert found.train_info.final == whole.train_info.points[2].students
    assert found.train_info.points[2].cosine == whole.train_info.points[2].cosine
    end(whole, tmp_path / "dcr")
    assert read_under_way(tmp_path) == []


def test_a_conversion_shows_its_perplexity(tmp_path: Path):
    scores = {"loss": 2.0, "accuracy": 0.5}
    points = [replace(point, blend=scores, students={"loss": 3.0}) for point in run(**SETTINGS).train_info.points]
    teacher = {"perplexity": 6.5}
    made = changed(run(**SETTINGS), score="perplexity", points=points, teacher=teacher, teacher_eval=teacher, final={})
    begin(made, tmp_path / "training", 2)
    (found,) = read_under_way(tmp_path)
    assert found.train_info.final["perplexity"] == pytest.approx(20.0855, abs=1e-3)
    data = Live(tmp_path).data()[1]
    assert (data["score"], data["percent"]) == ("perplexity", False)
    assert data["groups"][0]["teacher"] == "6.5"
    assert data["groups"][0]["lines"]["dcr"]["overall"]["blend"][0][0] == pytest.approx(7.389, abs=1e-3)
    end(changed(made, points=found.train_info.points, final={"perplexity": 20.0}), tmp_path / "training")
    _, ended, took = Live(tmp_path).data()[1]["answer"]
    assert ended == "Alone, the students of DCR end at 20 perplexity (the teacher: 6.5)."
    assert took == "While teachers are part of it, the blend never rises above 7.39."


def test_data_change_with_the_files_and_nothing_is_compared_before_the_end(served: tuple[Path, int]):
    folder, port = served
    status, content, tag = asked(port, "/data")
    assert (status, json.loads(content)["answer"]) == (200, ["No run has begun yet; a teacher that a run needs trains first."])
    assert asked(port, "/data", **{"If-None-Match": tag or ""})[:2] == (304, b"")
    runs = grid(methods=["theseus", "dcr"], groups=["all"], seeds=5, **SETTINGS)
    save(runs[:-1], folder)
    begin(runs[-1], folder / "last", 2)
    status, content, newer = asked(port, "/data", **{"If-None-Match": tag or ""})
    data = json.loads(content)
    assert (status, newer != tag) == (200, True)
    assert data["answer"][1] == "1 run under way, 9 finished; scores are those of the last evaluations so far."
    assert {row["mark"] for row in data["groups"][0]["rows"]} == {""}
    assert data["groups"][0]["comparisons"] == []
    end(runs[-1], folder / "last")
    data = json.loads(asked(port, "/data")[1])
    assert len(data["answer"]) == 3
    assert "best" in {row["mark"] for row in data["groups"][0]["rows"]}
    assert sorted(path.name for path in folder.iterdir()) == sorted({path.parent.name for path in folder.rglob("result.json")})


def test_only_this_page_on_this_machine_is_answered(served: tuple[Path, int]):
    _, port = served
    assert asked(port, "/")[0] == 200
    assert asked(port, "/", Host="evil.example")[0] == 403  # a name that another page has bent to this address
    assert asked(port, "/../../etc/passwd")[0] == 404
    assert asked(port, "/table.csv")[0] == 404
    with pytest.raises(ConfigError, match=f"the page cannot be served on port {port}"):
        server(Live(Path()), port)


def test_a_reference_without_a_run_yet_is_waited_for(tmp_path: Path):
    begin(run(**SETTINGS), tmp_path / "dcr", 2)
    assert Live(tmp_path, reference="student_only").data()[1]["groups"]


def test_an_open_page_follows_the_runs(browser: Any, served: tuple[Path, int]):
    from playwright.sync_api import expect

    folder, port = served
    whole, other = run(**SETTINGS), run(method="theseus", **SETTINGS)
    page = browser.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    page.goto(f"http://127.0.0.1:{port}/")
    expect(page.locator("#answer")).to_contain_text("No run has begun yet")
    assert page.locator("#story").is_hidden()
    begin(whole, folder / "dcr", 3)
    expect(page.locator("#figure-accuracy path.series")).to_have_count(2, timeout=15_000)
    page.get_by_role("button", name="Steps", exact=True).click()
    begin(other, folder / "theseus", 2)
    expect(page.locator("#figure-accuracy path.series")).to_have_count(4, timeout=15_000)
    assert page.locator("#axis button[aria-pressed=true]").inner_text() == "Steps"  # the reader's choice stays
    end(whole, folder / "dcr")
    end(other, folder / "theseus")
    expect(page.locator("#answer li")).to_have_count(3, timeout=15_000)
    expect(page.locator("#live")).to_contain_text("Live, changed at")
    assert complaints == []
    page.close()


@pytest.mark.processes
def test_a_command_opens_the_page_and_takes_it_down_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened = tmp_path / "opened"
    script = tmp_path / "browser"
    script.write_text(f'#!/bin/sh\necho "$1" > {opened}\nexec sleep 20\n')  # as a browser that waits for its window
    script.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{script} %s")
    begin(run(**SETTINGS), tmp_path / "runs" / "dcr", 2)
    with watching(tmp_path / "runs", opens=True):
        deadline = time.monotonic() + 120
        while not (opened.exists() and opened.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.1)
        address = opened.read_text().strip()
        assert address.startswith("http://127.0.0.1:")
        assert b"Segue report" in urllib.request.urlopen(address, timeout=60).read()
    with pytest.raises(OSError):
        urllib.request.urlopen(address, timeout=5)
    with watching(tmp_path / "runs", opens=False):
        assert os.environ.get("SEGUE_PARENT") is None
