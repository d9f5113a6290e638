"""The paper's scale: its whole path, on small files in CIFAR-100's format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from segue.data import Torchvision
from segue.lab import presets as scales
from segue.lab import variants
from segue.lab.config import Teacher
from segue.lab.models import Timm
from segue.lab.run import run


def write_cifar_100(folder: Path, train: int, test: int) -> None:
    """Write random images in the binary layout: coarse label, fine label, 3,072 bytes."""
    generator = torch.Generator().manual_seed(0)
    place = folder / "cifar-100-binary"
    place.mkdir(parents=True)
    for name, count in (("train", train), ("test", test)):
        rows = torch.randint(256, (count, 3074), generator=generator, dtype=torch.uint8)
        rows[:, 0] = 0
        rows[:, 1] = torch.arange(count) % 100
        (place / f"{name}.bin").write_bytes(rows.numpy().tobytes())


def test_the_whole_path_runs_on_files_of_the_same_format(tmp_path):
    pytest.importorskip("timm")
    write_cifar_100(tmp_path / "data", train=200, test=100)
    scale = scales.paper(folder=tmp_path / "data")
    assert scale.task.source == Torchvision(name="CIFAR100", folder=str(tmp_path / "data"))
    task = replace(scale.task, model=Timm(name="test_vit", pretrained=False), size=32)
    stages = tuple(replace(stage, recipe=replace(stage.recipe, epochs=1)) for stage in scale.teacher.stages)
    tiny = replace(
        scale,
        task=task,
        teacher=Teacher(task=task, stages=stages, batch=100),
        recipe=replace(scale.recipe, epochs=2),
        batch=100,
        looks=2,
    )
    result = run(tiny.run(variants.ALL["dcr_dfg"]), tmp_path / "runs" / "paper" / "dcr_dfg")
    info = result.train_info
    assert (info.total_steps, info.steps_per_epoch) == (4, 2)
    assert len(info.sites) == len(info.points[0].cosine) > 0
    assert info.points[0].blend == pytest.approx(info.teacher_eval)
    assert 0 <= result.final <= 1
