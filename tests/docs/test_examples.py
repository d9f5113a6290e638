"""The examples run, as a user starts them, only shorter."""

import difflib
import importlib.util
import json
import runpy
import shutil
import sys
import warnings
from pathlib import Path

import PIL.Image
import pytest
import torch

from tests.helpers.processes import run_python

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
TOOL = EXAMPLES.parent / "docs" / "tools" / "readme_handover.py"
FIGURES = EXAMPLES.parent / "docs" / "figures"
SHARED = "small_vit.py"  # the model and the data of the others
ELSEWHERE = {"lm_eval_harness.py", "timm_vit.py"}  # tested with what it is about; tested below, on a smaller model
PAIR = ("vit_torch.py", "vit_segue.py")
SAYS = {
    "vit_torch.py": "accuracy with linear attention",
    "vit_segue.py": "accuracy with linear attention",
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
    assert all(len(path.read_text().splitlines()) < (120 if path.name == SHARED else 80) for path in EXAMPLES.glob("*.py"))


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
    run(name, "--steps", "10", *(("--seeds", "1") if name in PAIR else ()))
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


@pytest.mark.processes
def test_two_processes_run_the_example_for_them(tmp_path):
    launch = ("-m", "torch.distributed.run", "--nproc_per_node", "2")
    done = run_python(*launch, EXAMPLES / "ddp.py", "--steps", "10", timeout=600, cwd=tmp_path)
    assert "trained by 2 processes" in done.stdout


def test_the_pair_differs_in_the_handover_only():
    plain, with_segue = ((EXAMPLES / name).read_text().partition('"""\n\n')[2].splitlines() for name in PAIR)
    difference = [line for line in difflib.ndiff(plain, with_segue) if line[0] in "+-"]
    assert sum(line[0] == "-" for line in difference) <= 9
    assert sum(line[0] == "+" for line in difference) <= 24
    assert not any("segue" in line for line in plain)
    assert [line for line in plain if "def main" in line or "batches(" in line] == [
        line for line in with_segue if "def main" in line or "batches(" in line
    ]


@pytest.mark.parametrize("name", PAIR)
def test_steps_do_not_shrink_the_training_of_the_teacher(name, run, capsys):
    run(name, "--steps", "1", "--seeds", "1")
    before, after = (
        float(line.split()[place]) for line, place in zip(capsys.readouterr().out.splitlines(), (2, 4), strict=True)
    )
    assert before > 0.95
    assert after < before - 0.1  # one step is not enough for anyone


@pytest.fixture
def tool(monkeypatch):
    """Import the script that measures and draws the picture of the README."""
    monkeypatch.syspath_prepend(EXAMPLES)
    threads = torch.get_num_threads()
    specification = importlib.util.spec_from_file_location("readme_handover", TOOL)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    yield module
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", PAIR)
def test_the_picture_shows_what_the_pair_does(name, tool, run, capsys):
    run(name, "--steps", "12", "--seeds", "1")
    printed = capsys.readouterr().out.splitlines()[-1].split()[4]
    blend, students = tool.curves("swap" if name == "vit_torch.py" else "fit", seed=0, steps=12)
    assert f"{students[-1]:.3f}" == printed
    assert len(students) == 3  # at steps 0, 10 and 12
    if name == "vit_segue.py":
        assert blend[0] > 0.95 > 0.5 > students[0]  # the model works from the first step, its students do not


def test_the_handover_of_the_picture_blends(tool):
    blend, students = tool.curves("handover", seed=0, steps=12)
    assert blend[0] > 0.95 > 0.5 > students[0]
    assert blend[-1] == students[-1]


def test_the_picture_is_drawn_from_the_saved_numbers(tool, tmp_path):
    saved = FIGURES / "readme-handover.json"
    shutil.copy(saved, tmp_path)
    tool.main(seeds=0, folder=tmp_path, only_draw=True, only_search=False)
    assert (tmp_path / "readme-handover.png").stat().st_size < 150_000
    assert (FIGURES / "readme-handover.png").stat().st_size < 150_000
    measured = json.loads(saved.read_text())
    assert measured["setting"] == {"images": tool.COUNT, "steps": tool.STEPS, "seeds": 10, "test images": 500}
    assert measured["rates"] == {name: lr for name, (_, lr) in tool.SHOWN.items()}
    for name, values in measured["final of every seed"].items():
        assert tool.spread(values) == pytest.approx(measured["final"][name], abs=1e-3)


def test_the_pair_says_what_was_measured(tool):
    final = json.loads((FIGURES / "readme-handover.json").read_text())["final"]
    for name, method in zip(PAIR, ("swap", "fit"), strict=True):
        mean, half = final[method]
        assert f"{mean:.3f} ± {half:.3f} (10 seeds)" in (EXAMPLES / name).read_text()


@pytest.mark.processes
def test_a_timm_model_without_its_weights_says_so(tmp_path):
    photos = tmp_path / "photos" / "cats"
    photos.mkdir(parents=True)
    PIL.Image.new("RGB", (40, 30), "orange").save(photos / "one.png")
    environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "empty")}
    command = (EXAMPLES / "timm_vit.py", "--model", "test_vit", "--steps", "2", "--batch", "2", "--images", photos.parent)
    done = run_python(*command, timeout=600, cwd=tmp_path, env=environment)
    assert "test_vit: RANDOM weights" in done.stdout
    assert "images: 1 in " in done.stdout
    assert "step 2: loss " in done.stdout


def test_a_timm_model_without_a_folder_sees_the_photos_of_scikit_learn(run, capsys):
    run("timm_vit.py", "--model", "test_vit", "--steps", "2", "--batch", "2")
    printed = capsys.readouterr().out
    assert "images: scikit-learn's two photos" in printed
    assert "step 2: loss " in printed
