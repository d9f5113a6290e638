"""Presets: the same experiment in minutes, in an hour, and as in the paper."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from segue.data import Torchvision
from segue.lab import presets, variants
from segue.lab.config import Teacher
from segue.lab.models import Timm
from segue.lab.presets import early_evaluations
from segue.lab.run import run as carry_out


def test_the_paper_preset_has_every_setting_of_the_appendix():
    preset = presets.paper()
    head, everything = preset.teacher.stages
    assert (head.head_only, everything.head_only) == (True, False)
    assert (head.recipe.epochs, head.recipe.lr, head.recipe.final_lr) == (6, 1e-3, 1e-6)
    assert head.recipe.warmup * head.recipe.epochs == pytest.approx(2)
    assert (everything.recipe.epochs, everything.recipe.lr) == (6, 1e-4)
    recipe = preset.recipe
    assert (recipe.epochs, recipe.lr, recipe.decay, recipe.weight_decay, recipe.clip) == (50, 5e-4, "cosine", 0.05, 1.0)
    assert (recipe.eps, recipe.betas, recipe.precision) == (1e-8, (0.9, 0.999), "bf16")
    assert preset.batch == preset.teacher.batch == 128
    assert preset.task.label_smoothing == preset.teacher.task.label_smoothing == 0.1
    assert isinstance(preset.task.model, Timm)
    assert preset.task.model == Timm(name="vit_small_patch16_224", pretrained=True)
    assert preset.data_fraction == 1.0


def test_a_run_has_its_seed_everywhere_but_in_its_teacher():
    preset = presets.demo(steps=40)
    runs = [preset.run(variants.ALL["theseus"], seed=seed) for seed in (0, 5)]
    for run, seed in zip(runs, (0, 5), strict=True):
        assert run.seed == run.recipe.seed == run.plan.seed == seed
        assert run.plan.sites == preset.task.sites
        assert (run.experiment, run.method, run.label) == ("demo", "theseus", "Theseus")
    assert runs[0].teacher == runs[1].teacher
    other = preset.run(variants.ALL["dcr"], data_fraction=0.5, sites="blocks.*.mlp", train="all", group="half")
    assert (other.data_fraction, other.plan.sites, other.plan.train, other.group) == (0.5, "blocks.*.mlp", "all", "half")
    assert preset.run(variants.ALL["dcr"]).data_fraction == preset.data_fraction == 0.25


@pytest.mark.parametrize("total", [4, 10, 77, 320, 1000])
@pytest.mark.parametrize("count", [2, 3, 8, 16])
def test_half_of_the_evaluations_come_in_the_first_quarter(total, count):
    found = early_evaluations(total, count)
    assert list(found) == sorted(set(found))
    assert found[-1] == total
    assert found[0] >= 1
    assert len(found) <= count
    if total >= 77:
        assert len(found) == count
        assert sum(step <= round(total / 4) for step in found) == count // 2


def test_one_evaluation_is_the_last_step():
    assert early_evaluations(100, 1) == (100,)


def test_a_preset_is_only_a_description_and_reads_no_file():
    presets.small("no/such/folder")
    presets.paper(folder="no/such/folder")
    presets.minilm("no/such/model", "no.tsv", "no.tsv")


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


def test_the_paper_preset_runs_on_files_of_the_same_format(tmp_path):
    pytest.importorskip("timm")
    write_cifar_100(tmp_path / "data", train=200, test=100)
    preset = presets.paper(folder=tmp_path / "data")
    assert preset.task.source == Torchvision(name="CIFAR100", folder=str(tmp_path / "data"))
    task = replace(preset.task, model=Timm(name="test_vit", pretrained=False), size=32)
    stages = tuple(replace(stage, recipe=replace(stage.recipe, epochs=1)) for stage in preset.teacher.stages)
    tiny = replace(
        preset,
        task=task,
        teacher=Teacher(task=task, stages=stages, batch=100),
        recipe=replace(preset.recipe, epochs=2),
        batch=100,
        evaluations=2,
    )
    result = carry_out(tiny.run(variants.ALL["dcr_dfg"]), tmp_path / "runs" / "paper" / "dcr_dfg")
    info = result.train_info
    assert (info.total_steps, info.steps_per_epoch) == (4, 2)
    assert len(info.sites) == len(info.points[0].cosine) > 0
    assert info.points[0].blend == pytest.approx(info.teacher_eval)
    assert 0 <= result.final <= 1
