"""Scales: the same experiment in minutes, in an hour, and as in the paper; and its methods."""

import dataclasses

import pytest

import segue
from segue.core.step_state import step_state
from segue.errors import ConfigError
from segue.gates import Bernoulli, Blend, GumbelSoftmax
from segue.lab import presets as scales
from segue.lab import variants
from segue.lab.models import Timm
from segue.lab.presets import early_looks
from segue.losses import FeatureGuidance, LogitDistillation
from segue.schedules import aggr20
from segue.students import Reinit

HERE = segue.Site("blocks.0.attn")


def test_the_paper_scale_has_every_setting_of_the_appendix():
    scale = scales.paper()
    head, everything = scale.teacher.stages
    assert (head.head_only, everything.head_only) == (True, False)
    assert (head.recipe.epochs, head.recipe.lr, head.recipe.final_lr) == (6, 1e-3, 1e-6)
    assert head.recipe.warmup * head.recipe.epochs == pytest.approx(2)
    assert (everything.recipe.epochs, everything.recipe.lr) == (6, 1e-4)
    recipe = scale.recipe
    assert (recipe.epochs, recipe.lr, recipe.decay, recipe.weight_decay, recipe.clip) == (50, 5e-4, "cosine", 0.05, 1.0)
    assert (recipe.eps, recipe.betas, recipe.precision) == (1e-8, (0.9, 0.999), "bf16")
    assert scale.batch == scale.teacher.batch == 128
    assert scale.task.label_smoothing == scale.teacher.task.label_smoothing == 0.1
    assert isinstance(scale.task.model, Timm)
    assert scale.task.model == Timm(name="vit_small_patch16_224", pretrained=True)
    assert scale.share == 1.0


def test_the_papers_methods_are_the_seven_with_their_settings():
    plans = {variant.name: variant.plan(sites="blocks.*.attn") for variant in variants.PAPER}
    assert list(plans) == ["student_only", "distillation", "theseus", "theseus_gumbel", "gumbel_dfg", "dcr", "dcr_dfg"]
    assert all(plan.train == "students" and plan.student == Reinit() for plan in plans.values())
    assert plans["distillation"].distill == LogitDistillation(temperature=4.0)
    assert isinstance(plans["theseus"].gate, Bernoulli)
    assert plans["theseus_gumbel"].gate == plans["gumbel_dfg"].gate == GumbelSoftmax(temperature=1.0)
    assert isinstance(plans["dcr"].gate, Blend)
    assert plans["dcr"].schedule == aggr20()
    assert isinstance(plans["dcr_dfg"].guidance, FeatureGuidance)
    dcr = [plans["dcr"].schedule(progress, HERE) for progress in (0.0, 0.1, 0.2, 1.0)]
    theseus = [1 - plans["theseus"].schedule(progress, HERE) for progress in (0.0, 0.1, 0.2, 1.0)]
    assert dcr == pytest.approx([1.0, 0.3, 0.0, 0.0])
    assert theseus == pytest.approx([0.1, 0.7, 1.0, 1.0])


def test_the_extras_are_what_their_names_say():
    plans = {name: variant.plan(sites="blocks.*.attn") for name, variant in variants.ALL.items()}

    def rates(name, *progress):
        return pytest.approx([1 - plans[name].schedule(p, HERE) for p in progress])

    assert rates("theseus_constant_0.5", 0.0, 0.9) == [0.5, 0.5]
    assert rates("theseus_constant_0.7", 0.0, 0.9) == [0.7, 0.7]
    assert rates("theseus_linear", 0.0, 0.25, 0.5, 0.9) == [0.1, 0.55, 1.0, 1.0]
    assert plans["dcr_all"].train == plans["student_only_all"].train == "all"
    assert plans["dcr_teacher_gradient"].teacher_gradient
    for name, weight in (("dcr_dfg_0.1", 0.1), ("dcr_dfg_0.3", 0.3), ("dcr_dfg_3", 3.0)):
        assert plans[name].guidance.weight == weight
    site = [HERE]
    held = [step_state(plans["dcr_dfg_hold"], site, step, 100).sites["blocks.0.attn"] for step in (0, 9, 10, 30)]
    assert [each.hold for each in held] == [True, True, False, False]
    assert [each.alpha for each in held] == pytest.approx([1.0, 1.0, 1.0, 0.0], abs=0.02)
    strengths = {
        name: [step_state(plans[name], site, step, 100).sites["blocks.0.attn"].guidance for step in (0, 50, 99)]
        for name in ("dcr_dfg", "dcr_dfg_constant", "dcr_dfg_linear")
    }
    assert strengths["dcr_dfg"][1:] == [0.0, 0.0]
    assert len(set(strengths["dcr_dfg_constant"])) == 1
    assert strengths["dcr_dfg_linear"][1] == pytest.approx(strengths["dcr_dfg_linear"][0] / 2)
    assert len({variant.label for variant in variants.ALL.values()}) == len(variants.ALL)


def test_methods_are_found_by_name_in_the_order_asked_for_and_once():
    assert variants.find(["paper"]) == list(variants.PAPER)
    assert len(variants.find(["all"])) == len(variants.ALL)
    assert [v.name for v in variants.find(["dcr", "paper", "dcr"])][:2] == ["dcr", "student_only"]
    assert len(variants.find(["dcr", "paper"])) == 7
    with pytest.raises(ConfigError, match="there is no method 'theseuss'") as caught:
        variants.find(["theseuss"])
    assert "Nearest names: theseus" in str(caught.value)


def test_another_lambda_changes_the_guided_methods_only():
    for variant in variants.PAPER:
        plain, other = variant.plan(sites="x"), variants.with_lambda(variant, 0.25).plan(sites="x")
        if isinstance(plain.guidance, FeatureGuidance):
            assert other.guidance.weight == 0.25
            assert dataclasses.replace(other, guidance=plain.guidance) == plain
        else:
            assert other == plain


def test_a_run_has_its_seed_everywhere_but_in_its_teacher():
    scale = scales.demo(steps=40)
    runs = [scale.run(variants.ALL["theseus"], seed=seed) for seed in (0, 5)]
    for run, seed in zip(runs, (0, 5), strict=True):
        assert run.seed == run.recipe.seed == run.plan.seed == seed
        assert run.plan.sites == scale.task.sites
        assert (run.experiment, run.method, run.label) == ("demo", "theseus", "Theseus")
    assert runs[0].teacher == runs[1].teacher
    other = scale.run(variants.ALL["dcr"], share=0.5, sites="blocks.*.mlp", train="all", group="half")
    assert (other.share, other.plan.sites, other.plan.train, other.group) == (0.5, "blocks.*.mlp", "all", "half")
    assert scale.run(variants.ALL["dcr"]).share == scale.share == 0.25


@pytest.mark.parametrize("total", [4, 10, 77, 320, 1000])
@pytest.mark.parametrize("looks", [2, 3, 8, 16])
def test_half_of_the_looks_come_in_the_first_quarter(total, looks):
    found = early_looks(total, looks)
    assert list(found) == sorted(set(found))
    assert found[-1] == total
    assert found[0] >= 1
    assert len(found) <= looks
    if total >= 77:
        assert len(found) == looks
        assert sum(step <= round(total / 4) for step in found) == looks // 2


def test_one_look_is_one_look():
    assert early_looks(100, 1) == (100,)


def test_a_scale_is_only_a_description_and_reads_no_file():
    scales.small("no/such/folder")
    scales.paper(folder="no/such/folder")
    scales.minilm("no/such/model", "no.tsv", "no.tsv")
