"""A stock Trainer drives a handover, saves it, resumes it and ends it."""

import copy
import dataclasses
import itertools
import json
from functools import partial
from typing import ClassVar

import pytest
import torch
import transformers
from torch.utils.data import DataLoader

import segue
from segue.core.modes import View
from segue.errors import CheckpointError, HandoverError, PlanError, SegueWarning
from segue.gates import GumbelSoftmax
from segue.integrations.transformers import HandoverCallback
from segue.losses import FeatureGuidance, LogitDistillation
from segue.phases import Phase, Rates
from segue.schedules import Constant
from tests.helpers.processes import FreshProcess, Ranks
from tests.helpers.tiny import same_state
from tests.integrations.small_trainers import (
    BAD,
    BY_SGD,
    CASES,
    FALLING,
    GUARD,
    KEPT,
    SITES,
    STEPS,
    TAKEOVER,
    Explode,
    Plain,
    Rows,
    bert,
    by_sgd,
    explode,
    fit_locally_alone,
    fit_locally_as_rank,
    guarded_alone,
    guarded_as_rank,
    llama,
    made,
    plan,
    resume_all,
    train,
    train_alone,
    train_as_rank,
    with_lora,
)

pytestmark = pytest.mark.slow


def test_a_stock_trainer_hands_over_and_leaves_a_plain_model_with_its_record(tmp_path):
    model = bert()
    names = list(model.state_dict())
    before = {name: x.clone() for name, x in model.state_dict().items()}
    trainer, callback = made(model, plan(), tmp_path, logging_strategy="steps", logging_steps=1)
    trainer.train()
    assert callback.handover.steps_done == STEPS
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == {name for name in names if ".attention.self." in name}
    assert list(model.state_dict()) == names
    assert not model._forward_hooks
    steps = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["alpha"] for line in steps[:6]] == pytest.approx([5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])
    assert all(line["aux_loss"] > 0 for line in steps)
    trainer.save_model(tmp_path / "end")
    assert json.loads((tmp_path / "end" / "config.json").read_text())["segue"] == model.segue
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "end")
    assert same_state(again.state_dict(), model.state_dict())


def by_hand(model, settings, data, accumulate, steps):
    """Train as a user's own loop does, and return the weights."""
    handover = segue.replace_(model.train(), settings, total_steps=steps)
    optimizer = torch.optim.SGD(handover.parameters(), lr=1e-2)
    epoch = list(DataLoader(data, batch_size=4))
    groups = [epoch[i : i + accumulate] for i in range(0, len(epoch), accumulate)]  # the last of an epoch may be smaller
    for group in (groups * steps)[:steps]:
        tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in group) if data.language else None
        for batch in group:
            aux = handover_aux(handover, model, batch, tokens)
            (aux[0] + aux[1] / len(group) if data.language else sum(aux) / len(group)).backward()
        optimizer.step()
        optimizer.zero_grad()
        handover.step()
    return handover.finalize_().state_dict()


def handover_aux(handover, model, batch, tokens):
    """Return the task's loss, a mean over all tokens of the step where they are counted, and the handover's."""
    task = model(**batch, **({} if tokens is None else {"num_items_in_batch": tokens}))["loss"]
    return task, handover.aux_loss(batch["attention_mask"])


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("kind", [llama, Plain])
def test_the_auxiliary_loss_weighs_as_in_a_loop_of_ones_own(kind, accumulate, tmp_path):
    data, sites = (Rows(language=True), "model.layers.*.self_attn") if kind is llama else (Rows(), "site")
    distill = LogitDistillation(schedule=Constant(alpha=1.0))
    settings = plan(sites=sites, gate=GumbelSoftmax(), distill=distill)
    model = kind()
    other = copy.deepcopy(model)
    ended = by_sgd(model, settings, tmp_path, data=data, gradient_accumulation_steps=accumulate, max_steps=4)
    expected = by_hand(other, settings, data, accumulate, 4)
    assert list(ended) == list(expected)
    for name, x in ended.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=1e-6)


class Rated(torch.optim.SGD):
    """Notes the rates of its groups in every step."""

    seen: ClassVar[list[dict[str, float]]] = []

    def step(self, closure=None):
        self.seen.append({group["kind"]: group["lr"] for group in self.param_groups})
        return super().step(closure)


def test_phases_set_the_rates_of_their_steps_by_kind(tmp_path):
    """Where a phase has no rate, Trainer's own schedule goes on as if there were no phases."""
    first = Phase(name="a", length=1 / 3, local=True, lr=Rates(new=0.5, backbone=0.25), decay="constant")
    settings = segue.Plan(sites=SITES, train="all", guidance=FeatureGuidance(), phases=(first, Phase(name="b")))
    callback = HandoverCallback(settings)
    given = (callback.optimizer(Rated), {"lr": 0.1})
    trainer, _ = made(bert(), settings, tmp_path, callback=callback, optimizer_cls_and_kwargs=given, max_steps=6)
    Rated.seen.clear()
    trainer.train()
    assert Rated.seen[:2] == [{"new": 0.5, "backbone": 0.25}] * 2
    assert [step["new"] for step in Rated.seen[2:]] == pytest.approx([0.1 * (6 - step) / 6 for step in range(2, 6)])
    assert all(step["backbone"] == step["new"] for step in Rated.seen[2:])


def local_fit(sites, **local):
    phases = (Phase(name="local fit", length=0.5, local=True, **{"split": 2, "reuse": 3, **local}), Phase(name="alone"))
    return segue.Plan(sites=sites, guidance=FeatureGuidance(), phases=phases)


@pytest.mark.parametrize(("kind", "half"), [(llama, False), (Plain, False), (llama, True)])
def test_several_updates_in_a_local_phase_are_those_of_a_loop_of_ones_own(kind, half, tmp_path):
    data, sites = (Rows(language=True), "model.layers.*.self_attn") if kind is llama else (Rows(), "site")
    model = kind()
    other = copy.deepcopy(model).train()
    ended = by_sgd(model, local_fit(sites), tmp_path, data=data, max_steps=4, bf16=half)
    handover = segue.replace_(other, local_fit(sites), total_steps=4)
    optimizer = torch.optim.SGD(handover.parameters(), lr=1e-2)
    for batch in list(DataLoader(data, batch_size=4))[:4]:
        if handover.phase.local:
            with handover.features(batch["attention_mask"]) as features, torch.autocast("cpu", enabled=half):
                other(**batch)
            losses = features.losses()
        else:
            with torch.autocast("cpu", enabled=half):
                losses = [other(**batch)["loss"]]
        for loss in losses:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        handover.step()
    expected = handover.finalize_().state_dict()
    for name, x in ended.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=1e-6)


class Counting(transformers.Trainer):
    """A Trainer that looks at the logits of some steps, as those of other libraries do."""

    looks = 0
    seen: ClassVar[list[torch.Tensor]] = []

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if self.state.global_step < self.looks:
            self.seen.append(outputs.logits)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(("accumulate", "half", "looks"), [(1, False, 0), (2, False, 0), (1, True, 0), (1, True, 3)])
def test_a_transfer_leaves_the_head_out_and_trains_as_a_loop_of_ones_own(accumulate, half, looks, tmp_path):
    """The first forward shows which site is the last; whoever asks for logits gets those of the original."""
    data, steps = Rows(rows=32, language=True), 4
    settings = segue.methods.transfer(sites="model.layers.*.self_attn", hold=0.75, split=1, lr=1e-2)
    model = llama()
    other, heads = copy.deepcopy(model).train(), []
    model.lm_head.register_forward_hook(lambda *_: heads.append(None))
    sizes = {"gradient_accumulation_steps": accumulate, "max_steps": steps, "bf16": half}
    Counting.seen.clear()
    callback = HandoverCallback(settings)
    sgd = callback.optimizer(torch.optim.SGD), {"lr": 1e-2}
    more = {"kind": Counting, "callback": callback, "optimizer_cls_and_kwargs": sgd, **BY_SGD, **sizes}
    trainer, _ = made(model, settings, tmp_path, data=data, **more)
    trainer.looks = looks
    with pytest.warns(SegueWarning, match="does not follow it"):
        assert (twin := copy.deepcopy(model)).forward.__self__ is twin
    trainer.train()
    transferring = 1 + max(0, looks - 1)
    assert len(heads) == transferring + accumulate * 2  # the phase after it: the students, and the original to distil from
    assert len(Counting.seen) == looks
    assert all(logits.shape[-1] == 50 for logits in Counting.seen)
    assert "forward" not in vars(model) or half  # where Accelerate's own stays

    handover = segue.replace_(other, settings, total_steps=steps)
    optimizer = torch.optim.SGD(handover.parameter_groups(), lr=1e-2)
    handover.schedule_rates(optimizer)
    batches = iter(DataLoader(data, batch_size=4))
    for _ in range(steps):
        for batch in itertools.islice(batches, accumulate):
            with torch.autocast("cpu", enabled=half):
                loss = handover.weighted(other(**batch)["loss"])
            loss = loss + handover.aux_loss(batch["attention_mask"])
            (loss / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        handover.step()
    expected = handover.finalize_().state_dict()
    for name, x in callback.handover.model.state_dict().items():
        torch.testing.assert_close(x, expected[name], rtol=1e-2 if half else 1e-4, atol=1e-3 if half else 1e-6)


def test_settings_without_a_place_for_several_updates_are_refused(tmp_path):
    with pytest.raises(segue.errors.ConfigError, match="2 batches are accumulated"):
        by_sgd(bert(), local_fit(SITES), tmp_path, gradient_accumulation_steps=2)
    with pytest.raises(HandoverError, match="the phase 'local fit' has a tolerance"):
        by_sgd(bert(), local_fit(SITES, tolerance=0.1), tmp_path)


def test_a_forward_that_fails_in_a_local_phase_leaves_the_view_of_the_model(tmp_path):
    trainer, callback = made(model := bert(), local_fit(SITES), tmp_path)
    trainer.train_dataset = [
        {"input_ids": torch.full((8,), 99), "attention_mask": torch.ones(8), "labels": torch.tensor(0)}
    ] * 8
    with pytest.raises(IndexError):
        trainer.train()
    assert torch.is_grad_enabled()
    assert all(seam.state.view is View.BLEND for seam in callback.handover.seams.values())
    assert model.training


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_train_as_one_that_accumulates(tmp_path):
    jobs = {
        "train": partial(train_as_rank, tmp_path),
        "local fit": partial(fit_locally_as_rank, tmp_path),
        "guarded": partial(guarded_as_rank, tmp_path),
    }
    ranks = Ranks(jobs, tmp_path)
    whole = {
        "train": train_alone(tmp_path / "alone", gradient_accumulation_steps=2),
        "local fit": fit_locally_alone(tmp_path / "alone", per_device_train_batch_size=8),
        "guarded": guarded_alone(tmp_path / "alone", gradient_accumulation_steps=2),
    }
    for job, alone in whole.items():
        first, second = ranks[job]
        assert same_state(first, second)
        for name, x in first.items():
            torch.testing.assert_close(x, alone[name], rtol=1e-4, atol=1e-6)
    assert whole["guarded"]["undone"].tolist() == [BAD]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Train every case undisturbed, and resume from its checkpoints in a fresh process."""
    folder = tmp_path_factory.mktemp("trainers")
    whole = {case: train(case, folder / case) for case in CASES}
    FreshProcess(resume_all, str(folder), log=folder / "log").check()
    return whole, torch.load(folder / "ends.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("step", [4, 8])
@pytest.mark.parametrize("case", CASES)
def test_a_trainers_own_checkpoint_continues_bit_for_bit_in_a_fresh_process(case, step, resumed):
    whole, ends = resumed
    assert same_state(ends[f"{case}, {step}"], whole[case])


def test_evaluation_sees_the_blend_and_no_auxiliary_loss(tmp_path):
    trainer, callback = made(bert(), plan(schedule=Constant(alpha=0.5)), tmp_path, max_steps=3)
    with pytest.warns(SegueWarning, match=r"stays open: at step 3 of 3 2 of 2 teachers still have a share"):
        trainer.train()
    model = trainer.model.eval()
    batch = next(iter(DataLoader(Rows(), batch_size=20)))
    found = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        assert found == pytest.approx(model(**batch).loss.item(), rel=1e-5)
        with callback.handover.as_student():
            students = model(**batch).loss.item()
    assert found != pytest.approx(students, rel=1e-3)
    with callback.handover.as_student():
        assert trainer.evaluate(metric_key_prefix="eval_students")["eval_students_loss"] == pytest.approx(students, rel=1e-5)


def test_the_best_model_is_one_whose_teachers_are_gone(tmp_path):
    """A blend is often best at first, where its teachers work; what counts is measured after takeover."""
    changes = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    upside_down = {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # so that the untrained are the best
    trainer, _ = made(bert(), plan(), tmp_path, load_best_model_at_end=True, **changes, **upside_down)
    trainer.train()
    scores = {line["step"]: line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line}
    late = {step: loss for step, loss in scores.items() if step >= 6}
    assert max(scores, key=scores.get) not in late  # else this test says nothing
    assert trainer.state.best_global_step == max(late, key=late.get) != STEPS
    assert trainer.evaluate()["eval_loss"] == pytest.approx(max(late.values()), rel=1e-5)


def test_early_stopping_counts_from_takeover_on(tmp_path):
    """Upside down, every evaluation is worse than the one before; those of the blend would stop it at step 2."""
    changes = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    upside_down = {"metric_for_best_model": "eval_loss", "greater_is_better": True, "load_best_model_at_end": True}
    stopping = transformers.EarlyStoppingCallback(early_stopping_patience=1)
    trainer, callback = made(bert(), plan(), tmp_path, callbacks=[stopping], **changes, **upside_down)
    trainer.train()
    assert TAKEOVER < trainer.state.global_step < STEPS
    assert trainer.state.best_global_step == trainer.state.global_step - 1
    assert callback.handover.model.segue["step"] == trainer.state.global_step


def test_a_guarded_trainer_is_a_guarded_loop_of_ones_own(tmp_path):
    model = bert()
    other = copy.deepcopy(model).train()
    callback = HandoverCallback(FALLING, guard=GUARD)
    ended = by_sgd(model, FALLING, tmp_path, callback=callback, callbacks=[Explode()])
    handover = segue.replace_(other, FALLING, total_steps=STEPS)
    optimizer = torch.optim.SGD(handover.parameters(), lr=1e-2)
    guard = GUARD.watch(handover, optimizer)
    for step, batch in enumerate((list(DataLoader(Rows(), batch_size=4)) * STEPS)[:STEPS]):
        if step == BAD:
            explode(other)
        loss = other(**batch).loss + handover.aux_loss(batch["attention_mask"])
        loss.backward()
        if guard(loss):
            optimizer.step()
        optimizer.zero_grad()
        handover.step()
    assert [(event["step"], event["restored"]) for event in guard.events] == [(BAD, KEPT)]
    assert [event["sites"] for event in callback.events] == [event["sites"] for event in guard.events]
    assert handover.raised == callback.handover.raised != {}
    for name, x in handover.finalize_().state_dict().items():
        torch.testing.assert_close(ended[name], x, rtol=1e-4, atol=1e-6)


def test_a_guarded_trainer_resumes_bit_for_bit_before_and_after_a_restore(tmp_path):
    def run(folder, resume=None):
        callback = HandoverCallback(FALLING, guard=GUARD)
        changes = {"save_strategy": "steps", "save_steps": 1, "max_grad_norm": 0.5, "callbacks": [Explode()]}
        trainer, _ = made(bert(0.1), callback.plan, tmp_path / folder, callback=callback, **changes)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.state_dict(), callback.events

    whole, events = run("whole")
    assert [(event["step"], event["restored"]) for event in events] == [(BAD, KEPT)]
    for step in (BAD - 1, BAD + 1):
        again, found = run(f"from {step}", str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert found == events
        assert same_state(again, whole)


def test_a_guard_that_cannot_see_the_loss_or_scale_it_is_refused(tmp_path):
    trainer, _ = made(
        bert(), None, tmp_path, callback=HandoverCallback(plan(guidance=None), guard=GUARD), label_smoothing_factor=0.1
    )
    with pytest.raises(HandoverError, match="the guard cannot see the loss"):
        trainer.train()
    with pytest.raises(HandoverError, match="does not support fp16"):
        HandoverCallback(plan(), guard=GUARD).refuse_unfit(accumulate=1, scaled=True)


def test_a_model_saved_in_the_middle_holds_both_sides(tmp_path):
    class Save(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            if state.global_step == 3:
                trainer.save_model(tmp_path / "middle")

    trainer, _ = made(bert(), plan(), tmp_path, callbacks=[Save()])
    trainer.train()
    saved = segue.core.tensor_files.read(tmp_path / "middle" / "model.safetensors")
    assert {"student", "teacher"} <= {part for name in saved for part in name.split(".")}


def test_lora_trains_beside_the_students_and_merges_into_a_plain_model(tmp_path):
    model = with_lora()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    settings = CASES["LoRA"][1]
    trainer, _ = made(model, settings, tmp_path, data=Rows(language=True))
    trainer.train()
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".self_attn." in name or "lora_" in name}
    with pytest.warns(SegueWarning, match=r"save model.merge_and_unload\(\)"):
        trainer.save_model(tmp_path / "adapters")
    batch = next(iter(DataLoader(Rows(language=True), batch_size=4)))
    with torch.no_grad():
        logits = model.eval()(**batch).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(**batch).logits, logits)
    assert list(merged.state_dict()) == list(CASES["language"][0]().state_dict())
    assert type(merged).__name__ == "LlamaForCausalLM"
    assert merged.config.segue["plan"]["sites"] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    merged.save_pretrained(tmp_path / "merged")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert same_state(again.state_dict(), merged.state_dict())


def test_activation_checkpointing_changes_nothing(tmp_path):
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    name = next(name for name in ("activation_checkpointing", "gradient_checkpointing") if name in names)  # new or old
    plain, spared = (by_sgd(bert(), plan(), tmp_path, **{name: on}) for on in (False, True))
    for name, x in plain.items():
        torch.testing.assert_close(spared[name], x)


# What is refused


def sum_of_logits(output, labels, **_):
    return output["logits"].sum()


@pytest.mark.parametrize("outside", [{"label_smoothing_factor": 0.1}, {"compute_loss_func": sum_of_logits}], ids=list)
def test_a_loss_from_outside_the_model_is_refused_only_where_ours_would_be_lost(outside, tmp_path):
    trainer, _ = made(bert(), plan(), tmp_path, **outside)
    with pytest.raises(HandoverError) as error:
        trainer.train()
    assert str(error.value) == (
        "guidance and distillation cannot be added to the loss.\n"
        "  Trainer does not use a loss of the model: label_smoothing_factor, compute_loss_func, or a model without one.\n"
        "  Hint: let the model compute it (labels in the batch), or use a plan without guidance and distill."
    )
    trainer, callback = made(bert(), plan(guidance=None), tmp_path, **outside)
    trainer.train()
    assert callback.handover.steps_done == STEPS


def test_a_loss_may_be_passed_by_more_than_one_backward(tmp_path):
    _, callback = made(bert(), plan(), tmp_path)
    for _ in range(2):
        loss = torch.ones((), requires_grad=True) * 2
        callback._watch(loss)
        loss.backward(retain_graph=True)
        loss.backward()
    assert callback._reached == [True, True]


def test_a_loss_that_is_left_aside_is_noticed(tmp_path):
    """The model has made a loss that holds ours, from a label that Trainer does not know, and Trainer takes another one."""

    class Unlabelled(Plain):
        def forward(self, input_ids, attention_mask, target):
            return super().forward(input_ids, attention_mask, target)

    data = [{"target" if name == "labels" else name: x for name, x in Rows()[i].items()} for i in range(20)]
    trainer, _ = made(Unlabelled(), plan(sites="site"), tmp_path, data=data, compute_loss_func=sum_of_logits)
    with pytest.raises(HandoverError, match="Trainer does not use a loss of the model"):
        trainer.train()


def test_an_optimizer_built_before_the_students_is_refused(tmp_path):
    model = bert()
    with pytest.raises(HandoverError, match="which was built before the students"):
        made(model, plan(), tmp_path, optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None))
    assert same_state(model.state_dict(), bert().state_dict())


def test_adapters_that_the_plan_would_freeze_are_refused(tmp_path):
    with pytest.raises(PlanError, match=r'use Plan\(train="all"\)'):
        made(with_lora(), plan(sites="model.layers.*.self_attn"), tmp_path)


def test_a_model_that_the_callback_has_not_changed_is_refused(tmp_path):
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    late = transformers.Trainer(bert(), arguments, train_dataset=Rows())
    late.add_callback(HandoverCallback(plan()))
    own = transformers.Trainer(
        args=arguments, train_dataset=Rows(), model_init=lambda: bert(), callbacks=[HandoverCallback(plan())]
    )
    for trainer in (late, own):
        with pytest.raises(HandoverError, match=r"It was added after Trainer was created, or .* \(model_init\)"):
            trainer.train()


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("fsdp", "shard every"),
        ("deepspeed", "not tested"),
        ("torch_compile", "cannot be compiled"),
        ("_n_gpu", "several devices"),
    ],
)
def test_engines_that_seams_do_not_support_are_refused(setting, found, tmp_path):
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    arguments.n_gpu  # noqa: B018  made on demand, and then kept
    setattr(arguments, setting, 2)
    with pytest.raises(HandoverError, match=found):
        HandoverCallback(plan()).on_init_end(arguments, None, None, model=bert())


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    every = {"save_strategy": "steps", "save_steps": 4}
    made(bert(), plan(), tmp_path / "ours", **every)[0].train()
    place = str(tmp_path / "ours" / "checkpoint-4")
    for settings, changes, found in (
        (plan(seed=1), {}, "Saved -> given: plan.seed: 0 -> 1."),
        (plan(), {"max_steps": 20}, "Saved -> given: total_steps: 12 -> 20."),
    ):
        with pytest.raises(CheckpointError, match=found):
            made(bert(), settings, tmp_path, **changes)[0].train(resume_from_checkpoint=place)
    other = bert()
    with torch.no_grad():
        other.get_submodule("bert.encoder.layer.0.attention.self").query.weight.add_(1)
    with pytest.raises(CheckpointError, match="Its teachers have other weights"):
        made(other, plan(), tmp_path)[0].train(resume_from_checkpoint=place)
    few = {"max_steps": 4, "save_steps": 2, "save_only_model": True}
    arguments = transformers.TrainingArguments(str(tmp_path / "plain"), use_cpu=True, report_to=[], **few)
    transformers.Trainer(bert(), arguments, train_dataset=Rows()).train()
    with pytest.raises(CheckpointError, match="written without this callback"):
        made(bert(), plan(), tmp_path)[0].train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))


def test_the_callback_has_no_handover_before_it_has_a_model():
    with pytest.raises(HandoverError, match="It has not seen a model"):
        HandoverCallback(plan()).handover  # noqa: B018
