"""`segue run` in two real processes gives what one gives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = ["-m", "segue", "run", "--method", "gumbel_dfg", "--set", "looks=3"]
TINY = ["--option", "steps=6", "--option", "teacher_steps=6", "--option", "depth=2"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def result(folder: Path, processes: int, *more: str) -> dict[str, Any]:
    """Run the command, launched as a user launches it, and read its result."""
    command = [*RUN, *TINY, "--out", str(folder / "runs"), *more]
    if processes > 1:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-addr", "127.0.0.1"]
        command = [*launch, "--master-port", str(free_port()), *command]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("runs/*/result.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return result(tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.parametrize("more", [(), ("--set", "recipe.shard=true")], ids=["ddp", "fsdp2"])
def test_two_processes_of_segue_run_give_the_losses_of_one(alone, more, tmp_path):
    together = result(tmp_path, 2, *more)
    assert together["meta_info"]["hardware"]["processes"] == 2
    ours, theirs = (found["train_info"] for found in (together, alone))
    assert ours["flops"] == theirs["flops"]
    assert ours["final"] == pytest.approx(theirs["final"], rel=1e-5)
    assert ours["teacher"] == pytest.approx(theirs["teacher"], rel=1e-5)
    for one, other in zip(ours["points"], theirs["points"], strict=True):
        assert one["step"] == other["step"]
        if one["step"] > 0:
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        for part in ("students", "blend", "cosine", "gradient_norm", "drift_students"):
            assert one[part] == pytest.approx(other[part], rel=1e-4, abs=1e-6), part
