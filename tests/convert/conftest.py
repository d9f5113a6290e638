"""Tiny models, texts and one finished conversion, made once for all tests of the folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.convert.small_models import STUDENT, convert, save, text
from tests.helpers.command import call


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("conversion")


@pytest.fixture(scope="session")
def base(place) -> Callable[[str], Path]:
    """Return the folder of a model by its kind; nobody writes to it."""
    return lambda kind: place / kind if (place / kind).exists() else save(kind, place / kind)


@pytest.fixture(scope="session")
def texts(place) -> Path:
    path = place / "text.txt"
    path.write_text(text())
    return path


@pytest.fixture(scope="session")
def converted(place, base, texts) -> Path:
    """A Llama whose attention was converted in six steps; nobody writes to it."""
    out = place / "converted"
    with pytest.MonkeyPatch.context() as patched:  # the checkpoints, which a finished conversion removes
        patched.setattr("segue.convert.convert._prune", lambda work: shutil.move(work / "checkpoints", place / "checkpoints"))
        said = convert("llama", base("llama"), texts, out, student=STUDENT, steps=6)
    (place / "said.txt").write_text(said)
    return out


@pytest.fixture
def copied(converted, tmp_path) -> Path:
    """The files of that conversion, to be spoiled."""
    for path in converted.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.fixture(scope="session")
def sources(place, texts) -> dict[str, Path]:
    """Data for the models that do not read plain text."""
    labelled = [f"{line},{int('one' in line)}" for line in texts.read_text().split(".\n")[:120]]
    (place / "labels.csv").write_text("text,label\n" + "\n".join(labelled))
    for part, count in (("train", 6), ("test", 5)):
        for label, name in enumerate(("dark", "light")):
            (place / "images" / part / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (9, 8), (20 * i, 100 * label, 7 * i)).save(place / "images" / part / name / f"{i}.png")
    return {"labels": place / "labels.csv", "encoder": place / "labels.csv", "vit": place / "images"}


@pytest.fixture(scope="session")
def family(place, base, texts, sources) -> Callable[[str], tuple[Path, str]]:
    """Return the folder of a model of another family, converted in three steps, and what was printed; made once."""

    @cache
    def made(kind: str) -> tuple[Path, str]:
        out = place / f"converted {kind}"
        given = {"steps": 3, "evaluations": 1, "validation": 0.2}
        return out, convert(kind, base(kind), sources.get(kind, texts), out, **given)

    return made


@pytest.fixture(scope="session")
def evaluated(converted, place) -> tuple[Path, str]:
    """The folder of the page that compares the converted Llama with its original, and what was printed."""
    out = place / "evaluated"
    return out, call("eval", converted, "--out", out, "--contexts", "8,16,32,400")


@pytest.fixture(scope="session")
def results(evaluated) -> dict[str, Any]:
    return json.loads((evaluated[0] / "results.json").read_text())
