"""The examples run, as a user starts them, only shorter."""

import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SHARED = "small_vit.py"  # the model and the data of the others
ELSEWHERE = {"lm_eval_harness.py"}  # tested with what it is about
SAYS = {
    "vit_torch.py": "accuracy with new attention",
    "vit_segue.py": "accuracy with new attention",
    "custom_student.py": "accuracy with the mixer",
    "resume.py": "10 losses and 71 tensors are the same, bit for bit",
    "hf_trainer.py": "accuracy with new attention",
    "lightning.py": "accuracy with new attention",
    "bert_theseus.py": "accuracy of 3 layers",
    "ddp.py": "trained by 1 process",
    "linearize_llm.py": "the same tokens without a cache: True",
}
LIGHTNING_SAYS = (
    ".*LeafSpec.* is deprecated",
    "The .*dataloader.* does not have many workers",
    "The dirpath has changed",
    "Checkpoint directory .* exists and is not empty",
    "You're resuming from a checkpoint that ended before the epoch ended",
)


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} - ELSEWHERE == {SHARED, *SAYS}


def test_every_example_is_short():
    assert all(len(path.read_text().splitlines()) < 80 for path in EXAMPLES.glob("*.py"))


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run an example in an empty folder."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(EXAMPLES)  # as `python examples/...` does
    monkeypatch.chdir(tmp_path)

    def start(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with torch.random.fork_rng(), warnings.catch_warnings():
            for known in LIGHTNING_SAYS:
                warnings.filterwarnings("ignore", known)
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    yield start
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(name, run, capsys):
    run(name, "--steps", "10")
    assert SAYS[name] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "left", "again", "end"),
    [
        # what a process that was killed in the middle of its blend left behind, where the next one finds it, and the result
        ("hf_trainer.py", "handover/checkpoint-2", "handover/checkpoint-2", "student/model.safetensors"),
        ("lightning.py", "epoch=0.ckpt", "last.ckpt", "student.pt"),
    ],
)
def test_an_example_stopped_in_the_middle_resumes_bit_for_bit(name, left, again, end, run, tmp_path):
    steps = "120" if name == "lightning.py" else "20"  # twenty to an epoch, where Lightning saves
    whole, second = tmp_path / "whole", tmp_path / "second"
    run(name, "--steps", steps, "--folder", str(whole))
    (second / again).parent.mkdir(parents=True)
    if (whole / "teacher").exists():
        shutil.copytree(whole / "teacher", second / "teacher")
    (shutil.copytree if (whole / left).is_dir() else shutil.copy)(whole / left, second / again)
    torch.manual_seed(99)
    run(name, "--steps", steps, "--folder", str(second), "--resume")
    assert (whole / end).read_bytes() == (second / end).read_bytes()


def test_two_processes_run_the_example_for_them(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        str(EXAMPLES / "ddp.py"),
        "--steps",
        "10",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert "trained by 2 processes" in done.stdout, done.stderr


def test_the_pair_differs_in_a_few_lines_only():
    plain, with_segue = (set((EXAMPLES / name).read_text().splitlines()) for name in ("vit_torch.py", "vit_segue.py"))
    assert len(plain - with_segue) <= 8
    assert len(with_segue - plain) <= 12
    assert not any("segue" in line for line in plain if "vit_segue" not in line)
