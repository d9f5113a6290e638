import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import segue
from segue.core.seam import Seam
from segue.errors import HandoverError, PlanError, SegueWarning, StudentError
from segue.gates import Bernoulli, Blend, GumbelSoftmax
from segue.schedules import Hold, Linear, PerSite, aggr20
from tests.helpers.tiny import SITES, Attention, Net, batch, constant, optimizer_for, same_bits, same_state, start, train

GATES = [Blend(), Bernoulli(), GumbelSoftmax()]


def state_of(model: nn.Module) -> dict[str, object]:
    return {
        "modules": [(name, id(module)) for name, module in model.named_modules(remove_duplicate=False)],
        "parameters": [(name, id(p), p.requires_grad, p._version) for name, p in model.named_parameters()],
        "modes": [module.training for module in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "attributes": sorted(model.__dict__),
    }


# Replacing


def test_replace_swaps_seams_in_and_freezes_everything_but_students():
    handover = start()
    assert all(isinstance(block.attn, Seam) for block in handover.model.blocks)
    trained = {name for name, p in handover.model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".attn.student." in name for name in trained)
    assert [name for name, _ in handover.named_parameters()][:2] == ["blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.bias"]
    assert len(list(handover.parameters())) == len(trained)


def test_at_the_start_the_model_is_the_teacher_bit_for_bit():
    x, _ = batch()
    original = Net()(x)
    for plan in (segue.Plan(sites=SITES, gate=gate) for gate in GATES):
        assert same_bits(start(plan).model(x), original)


def test_a_wrong_student_is_found_on_the_first_forward_without_an_example():
    for schedule in (aggr20(), constant(0.0)):
        handover = start(segue.Plan(sites=SITES, student=lambda t, s: nn.Linear(8, 4), schedule=schedule))
        with pytest.raises(StudentError, match=r"handover.cancel_\(\) brings the original model back"):
            handover.model(batch()[0])
        assert same_bits(handover.cancel_()(batch()[0][:1]), Net()(batch()[0][:1]))


@pytest.mark.parametrize("total", [0, -1, 1.5, True, "10"])
def test_a_run_has_at_least_one_step(total):
    model = Net()
    before = state_of(model)
    with pytest.raises(PlanError, match=rf"replace_\(total_steps=...\) must be a positive integer, got {total!r}"):
        segue.replace_(model, segue.Plan(sites=SITES), total_steps=total)
    assert state_of(model) == before


# What trains, and in which mode


# Driving


def test_step_moves_progress_alpha_and_weight():
    handover = start(segue.Plan(sites=SITES, schedule=Linear()), total_steps=4)
    optimizer = optimizer_for(handover)
    seen = []
    for _ in range(6):  # past the end too
        seen.append((handover.progress, handover.alphas["blocks.0.attn"], handover.seams["blocks.0.attn"].state.weight))
        with pytest.warns(SegueWarning) if handover.steps_done == 4 else nullcontext():
            train(handover, optimizer, 1)
    assert seen == [(0, 1, 0), (0.25, 0.75, 0.25), (0.5, 0.5, 0.5), (0.75, 0.25, 0.75), (1, 0, 1), (1, 0, 1)]


def test_gradient_accumulation_keeps_alpha():
    handover = start(segue.Plan(sites=SITES, schedule=Linear(), gate=Bernoulli()))
    optimizer = optimizer_for(handover)
    train(handover, optimizer, 3)
    weights = [seam.state.weight for seam in handover.seams.values()]
    for micro in range(4):
        F.cross_entropy(handover.model(batch(micro)[0]), batch(micro)[1]).backward()
        assert [seam.state.weight for seam in handover.seams.values()] == weights


def test_total_steps_may_come_late_and_change():
    handover = start(segue.Plan(sites=SITES, schedule=Linear()), total_steps=None)
    assert handover.progress == 0.0
    with pytest.raises(HandoverError, match="does not know how long the run is"):
        handover.step()
    handover.total_steps = 10
    train(handover, optimizer_for(handover), 5)
    assert handover.alphas["blocks.0.attn"] == 0.5
    handover.total_steps = 20
    assert handover.alphas["blocks.0.attn"] == 0.75
    with pytest.raises(PlanError):
        handover.total_steps = 0
    assert handover.total_steps == 20


@pytest.mark.parametrize("gate", GATES, ids=repr)
def test_all_seeds_train_through_the_anneal(gate):
    for seed in range(3):
        handover = start(segue.Plan(sites=SITES, gate=gate, schedule=Linear(until=0.8), seed=seed), total_steps=12)
        losses = train(handover, optimizer_for(handover), 12)
        assert all(torch.tensor(losses).isfinite())


def test_a_step_in_which_every_coin_fell_on_the_teacher_trains_on():
    handover = start(segue.Plan(sites=SITES, gate=Bernoulli(), schedule=constant(1.0)))
    optimizer = optimizer_for(handover)
    train(handover, optimizer, 2)
    x, y = batch()
    F.cross_entropy(handover.model(x), y).backward()
    assert all(p.grad is not None and p.grad.count_nonzero() == 0 for p in handover.parameters())


def test_a_coin_runs_only_the_branch_it_chose():
    handover = start(segue.Plan(sites=SITES, gate=Bernoulli(), schedule=constant(0.5)))
    optimizer = optimizer_for(handover)
    train(handover, optimizer, 1)
    calls: dict[str, list[str]] = {name: [] for name in handover.seams}
    for name, seam in handover.seams.items():
        for side in ("teacher", "student"):
            getattr(seam, side).register_forward_hook(lambda *_, n=name, s=side: calls[n].append(s))
    for _ in range(8):
        expected = {name: ["student" if seam.state.weight else "teacher"] for name, seam in handover.seams.items()}
        train(handover, optimizer, 1)
        assert calls == expected
        for seen in calls.values():
            seen.clear()


def test_evaluation_uses_the_mean_of_the_gate():
    x, _ = batch()
    blend = start(segue.Plan(sites=SITES, schedule=constant(0.3))).model.eval()
    coin = start(segue.Plan(sites=SITES, schedule=constant(0.3), gate=Bernoulli())).model.eval()
    assert same_bits(coin(x), blend(x))
    soft = start(segue.Plan(sites=SITES, schedule=constant(0.9), gate=GumbelSoftmax())).model.eval()
    hard = start(segue.Plan(sites=SITES, schedule=constant(1 - GumbelSoftmax()(0.9, None)))).model.eval()
    torch.testing.assert_close(soft(x), hard(x))


def test_hold_detaches_the_students_and_leaves_no_graph_through_the_backbone():
    plan = segue.methods.lolcats(sites=SITES)
    handover = start(plan, total_steps=10)
    x, _ = batch()
    output = handover.model(x)
    assert not output.requires_grad
    assert same_bits(output, Net()(x))
    gradients = torch.autograd.grad(handover.aux_loss(), list(handover.parameters()))
    assert all(g.isfinite().all() for g in gradients)


def test_hold_guidance_is_local():
    handover = start(segue.methods.lolcats(sites=SITES), total_steps=10)
    handover.model(batch()[0])
    part = handover.losses()["guidance/blocks.2.attn"]
    first = list(handover.seams["blocks.0.attn"].student.parameters())
    assert all(g is None for g in torch.autograd.grad(part, first, allow_unused=True))


def test_hold_guidance_moves_the_students_alone_even_where_the_backbone_trains():
    handover = start(segue.methods.lolcats(sites=SITES, train="all"))
    handover.model(batch()[0])
    handover.aux_loss().backward()
    moved = [name for name, parameter in handover.model.named_parameters() if parameter.grad is not None]
    assert moved
    assert all(".attn.student." in name for name in moved)


def test_hold_without_guidance_trains_on_with_zero_gradients():
    handover = start(segue.Plan(sites=SITES, schedule=Hold(fraction=0.5)), total_steps=6)
    train(handover, optimizer_for(handover), 6)
    assert set(handover.alphas.values()) == {0.0}


def test_per_site_schedules_close_sites_one_by_one():
    plan = segue.Plan(sites=SITES, schedule=PerSite(schedules={"blocks.0.*": constant(0.0)}, otherwise=constant(1.0)))
    handover = start(plan)
    handover.model(batch()[0])
    handover.step()
    calls = []
    for name, seam in handover.seams.items():
        seam.teacher.register_forward_hook(lambda *_, n=name: calls.append(n))
    handover.model(batch()[0])
    assert calls == ["blocks.1.attn", "blocks.2.attn"]


# Views


# Leaving


def test_finalize_gives_a_plain_model_with_the_original_names():
    model = Net().train()
    keys, flags = list(model.state_dict()), [p.requires_grad for p in model.parameters()]
    handover = segue.replace_(model, segue.Plan(sites=SITES), total_steps=5)
    train(handover, optimizer_for(handover), 5)
    with handover.as_student():
        expected = model(batch()[0])
    assert handover.finalize_() is model
    assert list(model.state_dict()) == keys
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(isinstance(block.attn, Attention) for block in model.blocks)
    assert same_bits(model(batch()[0]), expected)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert "train" not in model.__dict__
    assert model.segue["plan"]["sites"] == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]


def test_finalize_is_refused_while_a_teacher_has_a_share():
    handover = start()
    with pytest.raises(HandoverError) as error:
        handover.finalize_()
    assert str(error.value) == (
        "finalize_() needs alpha 0 at every site.\n"
        "  3 of 3 teachers still have a share; at 'blocks.0.attn' alpha is 1.\n"
        "  Hint: train until the schedule reaches 0, or call finalize_(force=True). Nothing was changed."
    )
    assert isinstance(handover.model.blocks[0].attn, Seam)
    handover.finalize_(force=True)


@pytest.mark.parametrize("trains", ["students", "all"])
def test_cancel_brings_the_original_back_bit_for_bit(trains):
    model = Net(dropout=0.1).train()
    model.blocks[1].requires_grad_(False)
    before, weights = state_of(model), copy.deepcopy(model.state_dict())
    handover = segue.replace_(model, segue.Plan(sites=SITES, train=trains), total_steps=5)
    train(handover, optimizer_for(handover), 4)
    assert handover.cancel_() is model
    assert same_state(model.state_dict(), weights)
    after = state_of(model)
    for part in ("modules", "modes", "hooks", "attributes"):
        assert after[part] == before[part]
    assert [p[:3] for p in after["parameters"]] == [p[:3] for p in before["parameters"]]


def test_nothing_goes_on_after_the_end():
    handover = start()
    handover.cancel_()
    for call in (handover.step, handover.aux_loss, handover.finalize_, handover.cancel_, lambda: handover.similarity(1)):
        with pytest.raises(HandoverError, match="needs a running handover.\n  This one is cancelled"):
            call()


def test_release_frees_teachers_at_takeover_at_once():
    handover = start(segue.Plan(sites=SITES, release=True), total_steps=10)
    optimizer = optimizer_for(handover)
    teachers = [weakref.ref(seam.teacher) for seam in handover.seams.values()]
    weights = [weakref.ref(seam.teacher.qkv.weight) for seam in handover.seams.values()]
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    gc.disable()
    try:
        train(handover, optimizer, 2)
        assert [ref() for ref in (*teachers, *weights)] == [None] * 6
    finally:
        gc.enable()
    assert held == [id(p) for group in optimizer.param_groups for p in group["params"]]
    train(handover, optimizer, 2)
    for call, what in ((lambda: handover.as_teacher().__enter__(), "as_teacher"), (handover.cancel_, "cancel_")):
        with pytest.raises(HandoverError, match=rf"{what}\(\) needs the teachers.\n  3 of 3 were released"):
            call()
    with pytest.raises(HandoverError, match="was released from memory when alpha had reached 0 for good"):
        handover.total_steps = 1000
    handover.finalize_()


@pytest.mark.parametrize(("step", "calls"), [(0, 1), (5, 0)])
def test_a_handover_that_resumes_compares_the_two_sides_only_at_its_start(step, calls):
    handover = start(segue.Plan(sites=SITES, schedule=constant(0.0)))
    asked = []
    handover.seams["blocks.1.attn"].teacher.register_forward_hook(lambda *_: asked.append(1))
    handover.resume_at(step)
    handover.model(batch()[0])
    assert len(asked) == calls


def test_units_are_the_teachers_and_students_that_are_there():
    handover = start(segue.Plan(sites=SITES, release=True))
    pairs = [(seam.teacher, seam.student) for seam in handover.seams.values()]
    assert handover.units() == [side for pair in pairs for side in pair]
    train(handover, optimizer_for(handover), 3)  # takeover is at 2
    assert handover.units() == [student for _, student in pairs]


def test_a_released_teacher_that_a_user_holds_stays_whole_in_one_process():
    handover = start(segue.Plan(sites=SITES, release=True))
    yours = handover.seams["blocks.0.attn"].teacher
    weights = {name: value.clone() for name, value in yours.state_dict().items()}
    train(handover, optimizer_for(handover), 3)  # takeover is at 2
    assert handover.seams["blocks.0.attn"].teacher is None
    assert same_state(yours.state_dict(), weights)


def test_release_waits_for_a_schedule_that_comes_back_and_for_guidance():
    rebound = segue.Plan(sites=SITES, release=True, schedule=lambda progress, site: 0.0 if progress < 0.5 else 0.2)
    handover = start(rebound)
    train(handover, optimizer_for(handover), 6)
    assert set(handover.alphas.values()) == {0.2}
    guidance = segue.losses.FeatureGuidance(schedule=Linear(until=0.5))
    guided = start(segue.Plan(sites=SITES, release=True, guidance=guidance))
    train(guided, optimizer_for(guided), 4)
    assert all(seam.teacher is not None for seam in guided.seams.values())
    train(guided, optimizer_for(guided), 1)
    assert all(seam.teacher is None for seam in guided.seams.values())


def test_replacing_twice_in_a_row_keeps_both_records():
    handover = start(total_steps=5)
    train(handover, optimizer_for(handover), 5)
    model = handover.finalize_()
    second = segue.replace_(model, segue.Plan(sites="head"), total_steps=5)
    train(second, optimizer_for(second), 5)
    second.finalize_()
    assert model.segue["plan"]["sites"] == ["head"]
    assert model.segue["earlier"]["plan"]["sites"][0] == "blocks.0.attn"


# Mistakes


def test_a_schedule_that_fails_in_the_middle_changes_nothing():
    handover = start(segue.Plan(sites=SITES, schedule=lambda progress, site: 1.0 if progress < 0.3 else float("nan")))
    optimizer = optimizer_for(handover)
    train(handover, optimizer, 2)
    with pytest.raises(PlanError, match="nan"):
        train(handover, optimizer, 1)
    assert handover.steps_done == 2
    assert set(handover.alphas.values()) == {1.0}
    with pytest.raises(
        PlanError,
        match="the gate must return a number from 0 to 1, got 2.0.\n  It was called with alpha 1 for site 'blocks.0.attn'",
    ):
        start(segue.Plan(sites=SITES, gate=lambda alpha, noise: 2.0))


def test_a_diverged_student_does_not_poison_the_teacher():
    handover = start(segue.Plan(sites=SITES, schedule=constant(1.0)))
    with torch.no_grad():
        handover.seams["blocks.1.attn"].student.qkv.weight.fill_(float("inf"))
    x, _ = batch()
    assert same_bits(handover.model(x), Net()(x))
    assert same_bits(handover.model.eval()(x), Net()(x))


def test_a_handover_says_where_it_is():
    assert str(start(total_steps=10)) == "Handover(Net, 3 sites, step 0 of 10, alpha 1)"


def test_handovers_do_not_outlive_their_model():
    handover = start()
    reference = weakref.ref(handover)
    del handover
    gc.collect()
    assert reference() is None
