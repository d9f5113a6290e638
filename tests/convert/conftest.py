"""Tiny models, texts and one finished conversion, made once for all tests of the folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.convert.small_models import STUDENT, convert, save, text


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
