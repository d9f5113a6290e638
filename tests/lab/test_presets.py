"""Presets: the same experiment in minutes, in an hour, and as in the paper."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import segue
from segue.data import Torchvision
from segue.lab import presets, variants
from segue.lab.config import Teacher
from segue.lab.models import Timm
from segue.lab.presets import early_evaluations
from segue.lab.run import run as carry_out
from segue.losses import FeatureGuidance
from segue.schedules import Constant


def test_the_paper_preset_has_the_settings_of_the_appendix():
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


def decayed(recipe) -> list[str]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = recipe.optimizer(model.named_parameters()).param_groups
    return [names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]]


def output_at_half(preset, variant):
    """Return the output of a replaced module while both sides have half the weight, and those of both sides."""
    plan = preset.run(variants.ALL[variant]).plan
    plan = replace(plan, sites="0", schedule=Constant(alpha=0.5))
    model = torch.nn.Sequential(torch.nn.MultiheadAttention(4, 2, batch_first=True))
    model.forward = lambda x: model[0](x, x, x, need_weights=False)[0]
    handover = segue.replace_(model, plan, total_steps=10)
    x = torch.randn(2, 3, 4)
    with handover.as_teacher():
        teacher = model(x)
    with handover.as_student():
        student = model(x)
    return model(x), (teacher + student) / 2


def test_what_differs_from_the_paper_is_what_the_documentation_lists():
    preset = presets.paper()
    plans = {variant.name: preset.run(variant).plan for variant in variants.PAPER}
    head, everything = (stage.recipe for stage in preset.teacher.stages)
    blended, mean_of_outputs = output_at_half(preset, "dcr")
    holds = {
        "trained weights": {plan.train for plan in plans.values()} == {"students"},
        "weight decay": preset.recipe.weight_decay == 0.05 and decayed(preset.recipe) == ["0.weight"],
        "fine-tuning of the teacher": (everything.lr, everything.final_lr, everything.decay, head.final_lr)
        == (1e-4, 0.0, "cosine", 1e-6),
        "feature guidance": plans["dcr_dfg"].guidance == plans["gumbel_dfg"].guidance == FeatureGuidance(scale="relative")
        and variants.ALL["dcr_dfg_paper_scale"].plan(sites="*").guidance == FeatureGuidance(scale="paper"),
        "place of the blend": torch.allclose(blended, mean_of_outputs, atol=1e-6),
        "gradient of Theseus": [name for name, plan in plans.items() if plan.teacher_gradient]
        == ["theseus", "theseus_gumbel", "gumbel_dfg"],
    }
    page = (Path(__file__).parents[2] / "docs/lab.md").read_text(encoding="utf-8")
    table = page.partition("except these:")[2].partition("| setting |")[2].partition("\n\n")[0]
    listed = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert listed == list(holds)
    assert [name for name, found in holds.items() if not found] == []
    assert len(holds) == 6  # experiments/paper counts them


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
