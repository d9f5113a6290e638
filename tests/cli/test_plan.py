"""`segue plan`: tables that a stranger understands, files for `segue convert`, and errors of three lines."""

from __future__ import annotations

import json

import pytest
from PIL import Image

import segue
from segue.errors import ConfigError, PlanError
from tests.convert import small_models
from tests.helpers.command import call

pytestmark = pytest.mark.slow
QUICK = ("--fit-steps", "2", "--subsets", "8", "--batches", "2", "--batch", "2", "--tokens", "16")
SITES = "model.layers.*.self_attn"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    small_models.save("llama", folder / "model")
    (folder / "text.txt").write_text(small_models.text())
    return folder


def command(files, *more):
    return ("plan", files / "model", "--sites", SITES, "--data", files / "text.txt", *QUICK, *more)


def test_a_plan_is_printed_and_saved(files, tmp_path):
    given = ("--candidates", "LinearAttention; WindowedLinear(window=2)", "--save", "cache_bytes=0.2", "--out", tmp_path)
    shown = call(*command(files, *given, "--cost-tokens", "48"))
    for part in ("The plan", "What can be saved of the model", "Replaced: ", "Cost of a site", "Next: segue convert"):
        assert part in shown
    plan = segue.Plan.from_dict(json.loads((tmp_path / "plan.json").read_text()))
    assert set(plan.sites) <= {f"model.layers.{i}.self_attn" for i in range(8)}
    assert plan.phases == segue.methods.transfer(sites="*").phases  # as a conversion without a plan
    staggered = segue.Plan.from_dict(json.loads((tmp_path / "staggered.json").read_text()))
    assert (staggered.sites, staggered.student) == (plan.sites, plan.student)
    assert set(staggered.schedule.schedules) == set(plan.sites)
    assert "plan.json trains all sites at once: transfer, then students alone." in shown
    assert {path.name for path in tmp_path.glob("*.png")} == {"frontier.png", "options.png", "pairs.png"}
    again = call(*command(files, *given, "--cost-tokens", "48", "--json"))
    assert segue.Plan.from_dict(json.loads(again.splitlines()[-1])["plan"]) == plan  # progress is on stderr
    converted = (
        "--plan",
        tmp_path / "plan.json",
        "--data",
        files / "text.txt",
        "--tokens",
        "16",
        "--batch",
        "2",
        "--steps",
        "4",
    )
    call("convert", files / "model", *converted, "--out", tmp_path / "converted")
    model = segue.from_pretrained(tmp_path / "converted")
    replaced = [name for name in plan.sites if type(model.get_submodule(name)).__name__ != "LlamaAttention"]
    assert replaced == list(plan.sites)


def test_a_timm_model_is_planned_on_a_folder_of_images(tmp_path):
    for part in ("train", "test"):
        for i in range(4):
            place = tmp_path / part / ("red", "blue")[i % 2]
            place.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (60 * i, 40, 10)).save(place / f"{i}.png")
    given = ("--candidates", "NarrowMlp(ratio=0.5); Drop(returns='zeros')", "--data", tmp_path, "--out", tmp_path / "out")
    shown = call("plan", "timm:test_vit", "--sites", "blocks.*.mlp", *QUICK, *given, "--kl", "5")
    assert "has random weights here" in shown
    assert "blocks.0.mlp" in shown


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (("--save", "flops=0.2", "--kl", "1"), ConfigError, "a plan has one budget."),
        (("--save", "flop=0.2"), ConfigError, "'flop' cannot be saved."),
        (("--save", "cache_bytes=0.99"), PlanError, "no choice of these candidates saves cache_bytes 99.0%."),
    ],
)
def test_a_wrong_budget_is_refused(files, tmp_path, given, kind, text):
    with pytest.raises(kind) as error:
        call(*command(files, "--candidates", "LinearAttention", "--out", tmp_path, *given))
    assert str(error.value).splitlines()[0] == text
