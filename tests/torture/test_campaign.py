"""A short campaign with a fixed seed, every part of it; and the campaign itself: what it records, counts and reports."""

from __future__ import annotations

import itertools
import json
import pickle
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.helpers.processes import FreshProcess
from tests.torture import campaign, page
from tests.torture.campaign import FOREIGN, HUNG, LOST, RIGHT, SILENT, Attempt, Bench, Outcome, Part, Record
from tests.torture.kills import Work, kill_and_resume, undisturbed
from tests.torture.parts import PARTS
from tests.torture.watch import bomb, watched

SEED = 0
SECONDS = {"killed trainings": 3, "two processes": 2, "wrong calls": 3, "damaged and forged checkpoints": 2}
STARTS_PROCESSES = ("kills", "two_processes", "full_disk", "long_run")  # the others watch or change their own


def run_short(part: Part, place: Path, seconds: float) -> None:
    campaign.run_part(part, Bench(part.name, place, SEED, seconds), Record(place / "record.jsonl"))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_nothing_breaks_in_a_short_campaign(part, tmp_path):
    seconds = SECONDS.get(part.name, 1)
    if part.entry.startswith(STARTS_PROCESSES):
        run_short(part, tmp_path, seconds)
    else:
        FreshProcess(run_short, part, tmp_path, seconds, log=tmp_path / "log").check()
    found = Record(tmp_path / "record.jsonl").read()
    assert found
    assert [outcome for outcome in found if outcome["verdict"] not in (RIGHT, FOREIGN)] == []
    foreign = [outcome for outcome in found if outcome["verdict"] == FOREIGN]
    assert len(foreign) <= max(1, 0.05 * len(found)), foreign  # few attempts: the campaign's 2 % would be none


def part_of(*attempts: Attempt) -> Part:
    class Made(Part):
        def attempts(self, bench):
            return iter(attempts[bench.begin :])

    return Made("a part", 1, "", "about")


def run(part: Part, place: Path, seconds: float = 10) -> list[tuple[str, str]]:
    record = Record(place / "record.jsonl")
    campaign.run_part(part, Bench("a part", place, 0, seconds), record)
    return [(found["case"], found["verdict"]) for found in record.read()]


def test_every_outcome_is_recorded_at_once_and_a_judge_that_fails_too(tmp_path):
    def two(place):
        assert (tmp_path / "record.jsonl").read_text().count("\n") == 1
        return [Outcome("second", LOST, "gone"), Outcome("third")]

    def broken(place):
        raise ValueError("what?")

    made = part_of(Attempt("a", lambda place: Outcome("first")), Attempt("b", two), Attempt("c", broken))
    assert run(made, tmp_path) == [("first", RIGHT), ("second", LOST), ("third", RIGHT), ("c", SILENT)]


def test_a_part_ends_with_its_time_but_tries_once_at_least(tmp_path):
    tried = Attempt("a", lambda place: Outcome("a"))
    assert len(run(part_of(tried, tried), tmp_path, seconds=0)) == 1


def test_an_attempt_begins_in_an_empty_folder(tmp_path):
    def look(place):
        found = list(place.iterdir())
        (place / "left").mkdir()
        return Outcome(str(found))

    assert run(part_of(Attempt("a", look), Attempt("b", look)), tmp_path) == [("[]", RIGHT)] * 2


def test_the_randomness_of_an_attempt_depends_on_the_seed_and_its_number():
    def numbers(seed, begin):
        chances = Bench("a part", Path(), seed, 0, begin).chances()
        return [chance.random() for chance in itertools.islice(chances, 3)]

    assert numbers(0, 2)[0] == numbers(0, 0)[2]
    assert numbers(0, 0) != numbers(1, 0)


def test_a_cut_line_of_the_record_is_left_out(tmp_path):
    record = Record(tmp_path / "record.jsonl")
    record.add("a part", Outcome("first"))
    with record.path.open("a") as file:
        file.write('{"part": "a pa')
    assert [found["case"] for found in record.read()] == ["first"]


ENDS = {"crash": "os._exit(3)", "hang": "time.sleep(60)", "end": "pass"}


@pytest.mark.processes
def test_a_part_that_hangs_or_dies_loses_one_attempt_and_continues(tmp_path, monkeypatch):
    place = tmp_path / "place"
    place.mkdir()
    begun = []

    def command(part, bench, begin, seconds):
        begun.append(begin)
        how = ["crash", "hang", "end"][len(begun) - 1]
        script = f"import os, time; open({str(place / 'now')!r}, 'w').write('[{begin + 4}, \"{how}\"]'); {ENDS[how]}"
        return [sys.executable, "-c", script]

    monkeypatch.setattr(campaign, "_command", command)
    monkeypatch.setattr(campaign, "PATIENCE", 1.5)
    record = Record(tmp_path / "record.jsonl")
    campaign._supervise(part_of(), Bench("a part", place, 0, 60), record)
    assert [(found["case"], found["verdict"]) for found in record.read()] == [("crash", SILENT), ("hang", HUNG)]
    assert begun == [0, 5, 10]


def append(folder: Path) -> None:
    """Work that is no good at resuming: it adds what it has added before."""
    folder.mkdir(exist_ok=True)
    with (folder / "file").open("a") as file:
        file.write("x" * 100)
    (folder / "done").touch()


def compare(folder: Path, reference: Path) -> None:
    assert (folder / "file").read_text() == (reference / "file").read_text()


@pytest.mark.processes
@pytest.mark.parametrize(("hows", "verdict"), [(("operation",), LOST), (("bytes",), LOST), (("SIGKILL",), RIGHT)])
def test_a_kill_finds_what_does_not_resume(hows, verdict, tmp_path):
    """It dies before it is done and after it has written; a signal comes before either, or after both."""
    work, bench = Work("append", append, (), compare, 1, hows), Bench("a part", tmp_path, 0, 1)
    _, facts = undisturbed(work, bench)
    assert facts.operations == 3
    assert facts.largest == 100
    chance = mock.Mock(choice=lambda known: known[0], randrange=lambda most: most - 1, random=lambda: 0.7)
    if hows == ("SIGKILL",):
        chance.random = lambda: 100.0  # it ends before
    found = kill_and_resume(work, bench, tmp_path / "run", 1, chance)
    assert found.verdict == verdict, found


def watch_a_bomb(folder: Path) -> None:
    with watched(folder) as seen:
        (folder / "inside").touch()
        pickle.loads(bomb(folder / "executed"))
        (folder.parent / "outside").touch()
    assert (folder / "executed").is_dir()
    assert [event.split()[0] for event in seen] == ["pickle.find_class", "open"], seen


@pytest.mark.processes
def test_what_is_executed_or_written_elsewhere_is_seen(tmp_path):
    (tmp_path / "folder").mkdir()
    FreshProcess(watch_a_bomb, tmp_path / "folder", log=tmp_path / "log").check()


def outcomes(**verdicts: int) -> list[dict[str, str]]:
    return [
        {"part": "killed grids", "case": f"case {i}", "verdict": verdict, "detail": "`why`"}
        for verdict, count in verdicts.items()
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("found", "fails"),
    [
        (outcomes(right=50), False),
        (outcomes(right=98, **{FOREIGN: 2}), False),
        (outcomes(right=97, **{FOREIGN: 3}), True),
        *((outcomes(right=999, **{verdict: 1}), True) for verdict in campaign.VERDICTS if verdict not in (RIGHT, FOREIGN)),
    ],
)
def test_what_makes_a_campaign_fail(found, fails):
    assert bool(page.failures(found)) is fails


def test_the_page_has_the_table_and_lists_what_did_not_end_rightly(tmp_path):
    page.write_page(tmp_path / "page.md", PARTS, outcomes(right=7, lost=2, **{FOREIGN: 1}), seed=3, minutes=8)
    text = (tmp_path / "page.md").read_text()
    assert "`make torture MINUTES=8 SEED=3`" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| killed grids")]
    assert [cell.strip() for cell in row.split("|")[2:-1]] == ["10", "7", "0", "2", "0", "0", "1", "0"]
    assert "\n## Foreign error\n\n- killed grids: `case 0`: `'why'`\n" in text
    assert text.count("- killed grids: `case") == 3
    assert all(f"- **{part.name}**: {part.about}" in text for part in PARTS)


def test_every_part_is_there():
    assert json.dumps([part.name for part in PARTS]).count("kill") == 3
    assert all((Path(__file__).parent / f"{part.entry.partition(':')[0]}.py").exists() for part in PARTS)
