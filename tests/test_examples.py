"""The examples run, as a user starts them, only shorter."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
SHARED = "small_vit.py"  # the model and the data of the others
SAYS = {
    "vit_torch.py": "accuracy with new attention",
    "vit_segue.py": "accuracy with new attention",
    "custom_student.py": "accuracy with the mixer",
    "resume.py": "10 losses and 71 tensors are the same, bit for bit",
}


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {SHARED, *SAYS}


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(name, monkeypatch, capsys):
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(EXAMPLES)  # as `python examples/...` does
    monkeypatch.setattr(sys, "argv", [name, "--steps", "10"])
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    torch.set_num_threads(threads)
    assert SAYS[name] in capsys.readouterr().out


def test_the_pair_differs_in_a_few_lines_only():
    plain, with_segue = (set((EXAMPLES / name).read_text().splitlines()) for name in ("vit_torch.py", "vit_segue.py"))
    assert len(plain - with_segue) <= 8
    assert len(with_segue - plain) <= 12
    assert not any("segue" in line for line in plain if "vit_segue" not in line)
