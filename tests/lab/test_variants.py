"""The methods as the lab compares them."""

import dataclasses

import pytest

import segue
from segue.core.step_state import step_state
from segue.errors import ConfigError
from segue.gates import Bernoulli, Blend, GumbelSoftmax
from segue.lab import variants
from segue.losses import FeatureGuidance, LogitDistillation
from segue.schedules import aggr20
from segue.students import Reinit

HERE = segue.Site("blocks.0.attn")


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
