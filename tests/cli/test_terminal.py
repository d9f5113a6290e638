"""The terminal: names that hold escape sequences, and markup, are shown and not obeyed."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import warnings
from contextlib import suppress

import pytest
from rich.table import Column, Table
from rich.text import Text

import segue
from segue.checkpoint.lock import FILE, locked
from segue.cli import commands, main
from segue.cli.terminal import PlainConsole
from segue.errors import OBEYED, ConfigError, SegueWarning, printable
from segue.lab.report import figures
from segue.reporting import records
from segue.training.progress import Progress
from tests.checkpoint.test_lock import enter_in_a_thread
from tests.helpers.command import runner
from tests.helpers.tiny import Net
from tests.lab.report.saved_runs import run

EVIL = "a\x1b]0;title\x07\x1b[2J\x9b31m\x7f\r\u202egnp.exe"
SHOWN = r"a\x1b]0;title\x07\x1b[2J\x9b31m\x7f\r\u202egnp.exe"


def shell(monkeypatch, capsys, *arguments) -> str:
    """Run the installed program's function and return everything that reached the terminal."""
    monkeypatch.setattr(sys, "argv", ["segue", *map(str, arguments)])
    with suppress(SystemExit):
        main()
    said = "".join(capsys.readouterr())
    assert OBEYED.search(said) is None, said
    assert "Traceback" not in said, said
    return said


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")


def test_what_a_terminal_obeys_is_written_out():
    assert printable(EVIL) == SHOWN
    assert printable("\udce9") == r"\udce9", "a file name that is not UTF-8"
    plain = "blocks.0.attn\n\tπ é 漢字 👩‍🔬 [red]"
    assert printable(plain) == plain
    assert all(printable(chr(code)) != chr(code) for code in (*range(9), *range(11, 32), *range(127, 160)))


def test_a_console_shows_text_tables_and_markup_as_they_are():
    out = io.StringIO()
    console = PlainConsole(file=out, force_terminal=True, width=300)
    table = Table(EVIL, title=EVIL)
    table.add_row(f"[bold]{EVIL}[/] :boom:")
    console.print(EVIL, table, Text(EVIL.replace("\x07", "").replace("\r", "")), "[/nothing]")  # rich drops these two
    said = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # rich's own
    assert OBEYED.search(said) is None
    assert said.count(SHOWN) == 4
    assert "gnp.exe [/nothing]" in said
    assert "[bold]a" in said
    assert ":boom:" in said
    assert "[/nothing]" in said


SITES = [(f"model.layers.{i}.self_attn", "5,308,416", "LlamaAttention", "q_proj.weight 2048x2048, o_proj") for i in (0, 31)]


def printed(width: int | None) -> str:
    """Print a table to a terminal of this width, or to a pipe."""
    out = io.StringIO()
    console = PlainConsole(file=out, **({} if width is None else {"force_terminal": True, "width": width, "no_color": True}))
    table = Table(Column("site", no_wrap=True), "parameters", "module", "shapes", title="Sites of a model")
    for row in SITES:
        table.add_row(*row)
    console.print(table)
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())


def test_a_table_in_a_pipe_is_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")
    lines = printed(None).splitlines()
    assert all(any(all(cell in line for cell in row) for line in lines) for row in SITES)


@pytest.mark.parametrize("width", range(29, 120, 7))
def test_a_table_never_cuts_a_word_and_names_the_columns_without_room(width):
    said = printed(width)
    table, _, rest = said.partition("Not shown for want of width: ")
    missing = re.findall(r"\w+", rest)
    columns = dict(zip(("site", "parameters", "module", "shapes"), zip(*SITES, strict=True), strict=True))
    for name, cells in columns.items():
        assert (name in missing) != bool(re.search(rf"┃ *{name} *┃", table)), said
        if name not in missing:
            assert {word for cell in cells for word in cell.split()} <= set(re.split(r"[\s│]+", table)), said
    assert max(map(len, said.splitlines())) <= width


def test_a_column_that_is_wider_than_the_terminal_continues_in_the_next_line():
    said = printed(16)
    assert max(map(len, said.splitlines())) <= 16
    assert all(site in re.sub(r"[\s│]", "", said) for site, *_ in SITES)


def test_errors_and_warnings_are_printable_and_have_three_lines():
    error = ConfigError(f"no {EVIL}", "line\n  line\n\nline", EVIL)
    assert str(error).splitlines() == [f"no {SHOWN}", "  line line line", f"  Hint: {SHOWN}"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(EVIL, SegueWarning, stacklevel=1)
    assert str(caught[0].message) == SHOWN
    checkpoint = segue.errors.CheckpointError(EVIL, EVIL, EVIL)
    assert str(checkpoint).splitlines() == [SHOWN, f"  {SHOWN}", f"  Hint: {SHOWN}"]


def test_module_names_of_a_model():
    model = Net()
    model.add_module(EVIL.replace(".", ""), Net())
    with pytest.raises(segue.errors.SiteError) as caught:
        segue.select(model, "gnpexe" + EVIL)
    assert OBEYED.search(str(caught.value)) is None


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_lines(terminal):
    out = io.StringIO()
    out.isatty = lambda: terminal  # type: ignore[method-assign]
    Progress(EVIL, 1, out=out)(1, EVIL)
    assert "\x1b]" not in out.getvalue()
    assert "\u202e" not in out.getvalue()
    assert out.getvalue().count(r"\x1b]0;title") >= 2


def test_a_checkpoint_folder_and_the_holder_of_its_lock(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "runs" / EVIL
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{")
    monkeypatch.chdir(tmp_path / "runs")
    said = shell(monkeypatch, capsys, "resume", "a")  # it offers the folder as the nearest name
    assert SHOWN in said
    with locked(folder):
        (folder / FILE).write_text(EVIL)
        with pytest.raises(segue.errors.CheckpointError) as caught:
            enter_in_a_thread(folder)
    assert str(caught.value).count(SHOWN) == 2


def test_an_argument_with_control_characters(monkeypatch, capsys, tmp_path):
    said = shell(monkeypatch, capsys, "report", "one", EVIL)  # typer itself would print it
    assert said.splitlines()[0] == f"ConfigError: an argument has characters that a terminal obeys: {SHOWN}"
    assert "ConfigError" in shell(monkeypatch, capsys, "report", "caf\udce9")


def test_the_names_of_a_forged_result(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(figures, "draw", lambda summary, folder: [])  # pictures have no terminal
    for seed in range(2):
        records.write(run(label=EVIL, group=f"{EVIL}[/]", method=EVIL, seed=seed, evaluations=3), tmp_path / f"[/]{seed}")
    records.write(run(experiment=EVIL, evaluations=3), tmp_path / "[" / "another")
    shown = shell(monkeypatch, capsys, "report", tmp_path / "[", "--title", "[/x]")
    assert shown.count(SHOWN) > 1
    assert "another (of another experiment than" in shown


def test_a_forged_record_of_a_converted_folder(monkeypatch, capsys, tmp_path):
    record = {"format": 1, "segue": {}, "base": {"config": {"model_type": EVIL}}, "files": {EVIL: EVIL}}
    (tmp_path / "segue.json").write_text(json.dumps(record))
    assert SHOWN in shell(monkeypatch, capsys, "eval", tmp_path)
    (tmp_path / "segue.json").write_text(json.dumps({**record, "files": {}}))
    assert SHOWN in shell(monkeypatch, capsys, "eval", tmp_path)


def test_a_folder_whose_name_is_markup(monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "draw", lambda summary, folder: [])
    folder = tmp_path / "runs [" / "] [red]"
    records.write(run(evaluations=3), folder / "one")
    printed = runner.invoke(commands.app, ["report", str(folder)], catch_exceptions=False).output
    assert "] [red]/report.html" in printed
    shutil.rmtree(folder)
