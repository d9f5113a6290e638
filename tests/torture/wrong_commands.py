"""Wrong commands: every command with one wrong option, or one damaged file, and what became of each.

The options come from the commands' own signatures, settings (`--set`) and options (`--option`) from those of dataclasses and
presets. A command is *refused* (three lines, or typer's usage error), *accepted*, *nonsense* where it accepts what is no number
for an option that takes one, *foreign* where a traceback comes out, *changed* where it failed and left files, or *hung*.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import math
import os
import re
import shutil
import sys
import typing
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from typer.models import ArgumentInfo

from segue.cli import commands, main
from segue.convert.options import Conversion
from segue.lab import grid, presets, variants
from segue.lab import run as lab_run
from segue.lab.config import Run
from tests.convert import small_models
from tests.torture.watch import HungError, within
from tests.torture.wrong_calls import (
    ACCEPTED,
    CHANGED,
    FOREIGN,
    HUNG,
    NONSENSE,
    REFUSED,
    _inside,
    allows,
    hints,
)

SECONDS = 60  # after which a command counts as hung
THREE_LINES = re.compile(r"(?:^|\n)\w+(Error|Warning)?: [^\n]+\n  [^\n]+\n  Hint: [^\n]+\n$")
TINY = {"steps": 2, "teacher_steps": 1, "depth": 1}

EXPERIMENT = """
from segue.lab import presets, variants

def runs(seeds=1, steps=2):
    preset = presets.demo(steps=steps, teacher_steps=1, depth=1)
    return [preset.run(variant, seed=seed) for seed in range(seeds) for variant in variants.find(["student_only", "dcr"])]
"""

VALUES = (
    "",
    "x",
    "0",
    "-1",
    "1.5",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "9" * 30,
    "true",
    "null",
    "[]",
    "{}",
    "=",
    "a=b",
    "seed=",
    "*",
)
VALUES += (
    "[",
    "**",
    "missing/path",
    "empty folder",
    "a file.txt",
    "garbage.bin",
    "/",
    "/dev/null",
    "a" * 300,
    "é",
    "--",
    "a:b/c",
)
NEW_PLACES = ("", "a file.txt", "a file.txt/below", "/dev/null", "/proc/below", "a" * 300)  # most other names may be written to
JSON_VALUES = ("x", "", "-1", "0", "1.5", "1e400", "NaN", "true", "null", "[]", '["x"]', "{}", "9" * 30)

VALID: dict[str, dict[str, Any]] = {
    "demo": {"out": "out"},
    "sites": {"model": "demo", "pattern": "blocks.*.attn"},
    "cost": {"model": "demo", "plan": "dcr", "sites": "blocks.*.attn", "batch": 1, "steps": 2},
    "convert": {
        "model": "llama",
        "sites": "model.layers.*.self_attn",
        "student": "LinearAttention",
        "data": "text.txt",
        "steps": 1,
        "batch": 4,
        "tokens": 8,
        "evaluations": 1,
        "out": "out",
    },
    "plan": {
        "model": "llama",
        "sites": "model.layers.*.self_attn",
        "candidates": "LinearAttention",
        "data": "text.txt",
        "kl": 50.0,
        "saves": "cache_bytes",
        "batches": 1,
        "batch": 2,
        "tokens": 16,
        "cost_tokens": 48,
        "fit_steps": 1,
        "subsets": 8,
        "out": "out",
    },
    "eval": {"folder": "converted", "contexts": "8", "texts": 2, "out": "out"},
    "methods": {},
    "doctor": {},
    "run": {"out": "out", "options": [f"{name}={value}" for name, value in TINY.items()], "settings": ["evaluations=1"]},
    "grid": {"experiment": "experiments/mine", "out": "out"},
    "tune": {"experiment": "experiments/mine", "trials": 3, "out": "out"},
    "pack": {"folder": "finished", "out": "out"},
    "resume": {"folder": "interrupted"},
    "report": {"folder": "finished"},
}
STUDENTS = ("LinearAttention(", "LinearAttention(x=1)", "WindowedLinear(window='x')", "WindowedLinear(window=-1)", "print('x')")
STUDENTS += ("Softmax().x", "lambda: 3", "Reinit(", "1", "NarrowMlp(ratio=nan)", "Adapter", "LeastSquares()", "FlaLayer('x')")
DAMAGED = (b"", b"\xff\xfe\x00\x01", b"{", b"[]", b"null", b"{}", b'"x"', b"[" * 100_000, b"1e999", b'{"a": NaN}')
BROKEN_CODE = (b"", b"def runs(:\n", b"\x00\xff", b"runs = 3\n", b"def runs():\n    return [3]\n", b"import no_such_module\n")
BROKEN_CODE += (
    b"def runs():\n    return None\n",
    b"def runs():\n    raise ValueError('x')\n",
    b"1 / 0\n",
    b"raise SystemExit(3)\n",
)
BROKEN_CODE += (b"def runs(seeds):\n    return []\n", b"from segue.lab import nothing\n", b"def runs(*a, **k):\n    return a\n")
READS: dict[tuple[str, ...], tuple[str, ...]] = {  # the files that a command reads
    ("resume", "interrupted"): ("config.json", "metrics.jsonl", "checkpoints/latest"),
    ("resume", "unfinished"): ("training/settings.json", "training/metrics.jsonl", "training/checkpoints/latest"),
    ("resume", "grid"): ("grid.json",),
    ("resume", "search"): ("tune.json",),
    ("report", "finished"): ("result.json",),
    ("eval", "converted", "--contexts", "8"): (
        *("segue.json", "manifest.json", "config.json", "generation_config.json"),
        *("tokenizer.json", "tokenizer_config.json", "README.md", "model.safetensors"),
    ),
    ("convert", "llama"): ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    ("sites", "llama"): ("config.json",),
    ("cost", "demo", "plan.json"): ("",),
}
DATA = {
    "text.txt": b"one two",
    "a.jsonl": b'{"text": "one"}\n{"text": ',
    "a.json": b"[1, 2]",
    "a.csv": b"a,b\n1\n",
    "a.parquet": b"PAR1",
}


@dataclass(frozen=True)
class WrongCommand:
    """A command line, and the file that is damaged before."""

    arguments: tuple[str, ...]
    file: str | None = None
    content: bytes = b""
    number: bool = False  # the wrong value is given where a number belongs, and is none
    allowed: bool = True  # by the type of the setting

    def __str__(self) -> str:
        damage = "" if self.file is None else f" [{self.file} = {self.content[:30]!r}]"
        return (
            " ".join(f"{argument[:40]!r}" if " " in argument or not argument else argument[:40] for argument in self.arguments)
            + damage
        )


@dataclass(frozen=True)
class Verdict:
    """What became of a command."""

    call: WrongCommand
    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: segue {self.call}: {self.detail}"


def cases() -> Iterator[WrongCommand]:
    """Yield every wrong command."""
    yield from _options()
    yield from _settings()
    yield from (WrongCommand(_line("convert", {"student": student})) for student in STUDENTS)
    yield from _damaged_files()


def _options() -> Iterator[WrongCommand]:
    for name in VALID:
        for parameter in parameters(name):
            if parameter.hint is bool:
                yield from (WrongCommand((*_line(name, {}), f"{parameter.option}={value}")) for value in ("", "x", "0"))
                continue
            numeric = parameter.hint in (int, float, int | None, float | None)
            for value in NEW_PLACES if parameter.name in ("out", "picture", "title") else VALUES:
                yield WrongCommand(_line(name, {parameter.name: [value]}), number=numeric and not _is_number(value))


def _settings() -> Iterator[WrongCommand]:
    """Yield wrong settings of a run, and wrong options of its preset."""
    config = presets.demo(steps=2, teacher_steps=1, depth=1).run(variants.ALL["dcr"])
    for path, hint in _paths(Run, config):
        for value in JSON_VALUES:
            given = {"settings": [f"{path}={value}"], "options": VALID["run"]["options"]}
            yield WrongCommand(_line("run", given), allowed=allows(hint, _parsed(value)))
    for name, parameter in inspect.signature(presets.demo, eval_str=True).parameters.items():
        for value in JSON_VALUES:
            kept = [pair for pair in VALID["run"]["options"] if not pair.startswith(f"{name}=")]
            given = {"options": [*kept, f"{name}={value}"]}
            yield WrongCommand(_line("run", given), allowed=allows(parameter.annotation, _parsed(value)))


def _damaged_files() -> Iterator[WrongCommand]:
    for arguments, files in READS.items():
        line = _line("convert", {}) if arguments[0] == "convert" else arguments
        for file in files:
            place = f"{arguments[1]}/{file}" if file else arguments[2]
            yield from (WrongCommand(line, place, content) for content in DAMAGED)
    yield from (WrongCommand(_line("grid", {}), "experiments/mine/runs.py", content) for content in BROKEN_CODE)
    for file, content in DATA.items():
        yield from (WrongCommand(_line("convert", {"data": file}), file, damaged) for damaged in (content, *DAMAGED[:3]))


def _paths(kind: Any, config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    known = hints(kind)
    for field in dataclasses.fields(kind):
        value = getattr(config, field.name)
        yield f"{prefix}{field.name}", known.get(field.name, Any)
        if dataclasses.is_dataclass(value) and prefix.count(".") < 1:
            yield from _paths(type(value), value, f"{prefix}{field.name}.")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a command: an option, or without one an argument that is given by its position."""

    name: str
    hint: Any
    option: str | None


def parameters(command: str) -> list[Parameter]:
    """Read the parameters of a command from its signature."""
    (callback,) = [
        c.callback for c in commands.app.registered_commands if c.callback and (c.name or c.callback.__name__) == command
    ]
    found = []
    for name, parameter in inspect.signature(callback, eval_str=True).parameters.items():
        hint, info = typing.get_args(parameter.annotation)
        said = [info.default, *(info.param_decls or ())]  # typer takes the first name for the default
        names = [each for each in said if isinstance(each, str) and each.startswith("--")] or [f"--{name.replace('_', '-')}"]
        found.append(Parameter(name, hint, None if isinstance(info, ArgumentInfo) else names[0]))
    return found


def _line(name: str, changed: dict[str, Any]) -> tuple[str, ...]:
    """Write a command line: valid arguments, some of them changed; positions last, so that '--' does not hide options."""
    given = {**VALID[name], **changed}
    line, positions = [name], []
    for parameter in parameters(name):
        values = given.get(parameter.name, [])
        for value in values if isinstance(values, list) else [values]:
            if parameter.option is None:
                positions.append(str(value))
            else:
                line.append(f"{parameter.option}={value}")
    return (*line, *positions)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class _StartsWorkError(BaseException):
    """A grid starts a process: its command line is accepted."""


def _start(*_: Any) -> Any:
    raise _StartsWorkError


def prepare(folder: Path, *, trained: bool = True) -> Path:
    """Make the files that the commands are given: a model, texts, an experiment; if `trained`, a conversion and runs too."""
    folder.mkdir(parents=True)
    (folder / "empty folder").mkdir()
    (folder / "a file.txt").write_text("one two three")
    (folder / "garbage.bin").write_bytes(bytes(range(256)) * 4)
    (folder / "plan.json").write_text("{}")
    (folder / "text.txt").write_text(small_models.text())
    (folder / "experiments" / "mine").mkdir(parents=True)
    (folder / "experiments" / "mine" / "runs.py").write_text(EXPERIMENT)
    (folder / "grid").mkdir()
    known = {"place": "segue.cli.demo", "options": {"steps": 2, "teacher_steps": 1}, "workers": 1, "engine": "local"}
    (folder / "grid" / "grid.json").write_text(json.dumps(known))
    (folder / "search").mkdir()
    (folder / "search" / "tune.json").write_text(json.dumps(known | {"tuning": {"trials": 3}}))
    small_models.save("llama", folder / "llama")
    if not trained:
        return folder
    with _inside(folder), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        from segue.convert.convert import convert

        settings = {name: value for name, value in VALID["convert"].items() if name != "out"}
        places = {"model": str(folder / "llama"), "data": str(folder / "text.txt")}
        with mock.patch("segue.convert.convert._prune"):  # an unfinished conversion has checkpoints
            convert(Conversion(**settings | places), Path("converted"))
        shutil.copytree("converted/training", "unfinished/training")
        config = presets.demo(steps=2, teacher_steps=1, depth=1).run(variants.ALL["dcr"])
        lab_run.run(config, Path("finished"))
        with mock.patch.object(lab_run.results, "write", side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
            lab_run.run(config, Path("interrupted"))
    return folder


def run(call: WrongCommand, prepared: Path, folder: Path) -> Verdict:
    """Run one wrong command in a fresh copy of the prepared files, in this process, and judge it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(prepared, folder / "here")
    here = folder / "here"
    if call.file is not None:
        (here / call.file).write_bytes(call.content)
    before = _listing(folder)
    out, error = io.StringIO(), io.StringIO()
    started = mock.patch.multiple(grid, _start=_start, _on_ray=_start)
    argv = mock.patch.object(sys, "argv", ["segue", *call.arguments])
    code: Any = 0
    try:
        with within(SECONDS), _inside(here), started, argv, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with redirect_stdout(out), redirect_stderr(error):
                main()
    except HungError:
        return Verdict(call, HUNG)
    except _StartsWorkError:
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException as unexpected:
        return Verdict(call, FOREIGN, f"{type(unexpected).__name__}: {unexpected}"[:200])
    said = error.getvalue()
    if "HungError" in said:  # `main` shows it as any mistake
        return Verdict(call, HUNG)
    if "Traceback" in said:
        return Verdict(call, FOREIGN, said.strip().splitlines()[-1][:200])
    if code == 0:
        return Verdict(call, NONSENSE if call.number or not call.allowed else ACCEPTED)
    if not (THREE_LINES.search(said) or (code == 2 and "Error" in said)):
        return Verdict(call, FOREIGN, f"exit {code}: {' '.join(said.split())[-200:]!r}")
    if "TrainingError: " not in said and (left := sorted(_listing(folder) ^ before)):  # a training that began leaves its part
        return Verdict(call, CHANGED, f"{left[0]}: {' '.join(said.split())[:120]}")
    return Verdict(call, REFUSED, " ".join(said.split())[:160])


def _listing(folder: Path) -> set[str]:
    found = {os.fspath(path.relative_to(folder)) for path in folder.rglob("*")}
    return {name for name in found if "__pycache__" not in name}  # Python's own, beside a file that is imported
