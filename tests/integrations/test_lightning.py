"""Lightning's Trainer drives a handover, saves it, resumes it and ends it."""

import lightning
import pytest
import torch
from torch.nn import functional as F

import segue
from segue.errors import CheckpointError, HandoverError, SegueWarning
from segue.gates import GumbelSoftmax
from segue.losses import FeatureGuidance, LogitDistillation
from segue.phases import Phase
from segue.schedules import Constant, Linear
from tests.helpers.processes import FreshProcess
from tests.helpers.tiny import SITES, Net, same_state
from tests.integrations.small_modules import (
    CASES,
    RESUMED,
    STEPS,
    HandoverCallback,
    Module,
    fit,
    loader,
    plan,
    resume_all,
    train,
)

pytestmark = pytest.mark.slow


def test_a_stock_trainer_hands_over_and_leaves_a_plain_model(tmp_path):
    module = Module(dropout=0.0)
    callback = HandoverCallback(plan())
    run = fit(module, [callback], tmp_path)
    assert callback.handover.steps_done == run.global_step == STEPS
    changed = {name for name, x in module.model.state_dict().items() if not torch.equal(x, Net().state_dict()[name])}
    assert changed == {name for name in Net().state_dict() if ".attn." in name}
    assert list(module.model.state_dict()) == list(Net().state_dict())
    assert module.model.segue["step"] == STEPS
    assert "training_step" not in vars(module)
    assert run.logged_metrics["alpha"] == 0
    assert run.logged_metrics["aux_loss"] > 0


@pytest.mark.parametrize("returns", [lambda loss: loss, lambda loss: {"loss": loss, "more": 1}], ids=["a tensor", "a dict"])
def test_the_auxiliary_loss_weighs_as_in_a_loop_of_ones_own(returns, tmp_path):
    class Returning(Module):
        def training_step(self, batch, batch_idx):
            return returns(super().training_step(batch, batch_idx))

    settings = plan(gate=GumbelSoftmax(), distill=LogitDistillation(schedule=Constant(alpha=1.0)))
    module = Returning(0.0, optimizer=torch.optim.SGD)
    fit(module, [HandoverCallback(settings)], tmp_path, loader(shuffle=False), accumulate_grad_batches=2, max_epochs=1)
    model = Net().train()
    handover = segue.replace_(model, settings, total_steps=5)
    optimizer = torch.optim.SGD(handover.parameters(), lr=1e-2)
    for index, (x, y) in enumerate(loader(shuffle=False)):
        loss = F.cross_entropy(model(x), y) + handover.aux_loss()
        (loss / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
            handover.step()
    expected = handover.finalize_().state_dict()
    for name, x in module.model.state_dict().items():
        torch.testing.assert_close(x, expected[name])


@pytest.mark.parametrize(("clip", "how"), [(None, "norm"), (0.1, "norm"), (0.01, "value")])
def test_several_updates_in_a_local_phase_are_those_of_a_loop_of_ones_own(clip, how, tmp_path):
    phases = (Phase(name="local fit", length=0.5, local=True, split=2, reuse=3, lr=4e-2), Phase(name="alone"))
    settings = segue.Plan(sites=SITES, guidance=FeatureGuidance(), phases=phases)
    module = Module(0.0)
    changes = {"accumulate_grad_batches": 1, "max_epochs": 1, "gradient_clip_val": clip, "gradient_clip_algorithm": how}
    fit(module, [HandoverCallback(settings)], tmp_path, loader(shuffle=False), **changes)
    model = Net().train()
    handover = segue.replace_(model, settings, total_steps=10)
    optimizer = torch.optim.AdamW(handover.parameters(), lr=1e-2)
    handover.schedule_rates(optimizer)
    for x, y in loader(shuffle=False):
        if handover.phase.local:
            with handover.features() as features:
                model(x)
            losses = features.losses()
        else:
            losses = [F.cross_entropy(model(x), y)]
        for loss in losses:
            loss.backward()
            if clip:
                getattr(torch.nn.utils, f"clip_grad_{how}_")(list(handover.parameters()), clip)
            optimizer.step()
            optimizer.zero_grad()
        handover.step()
    assert same_state(module.model.state_dict(), handover.finalize_().state_dict())


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Train every case undisturbed, and resume from its checkpoints in a fresh process."""
    folder = tmp_path_factory.mktemp("modules")
    whole = {case: train(case, folder / case) for case in CASES}
    FreshProcess(resume_all, str(folder), log=folder / "log").check()
    return whole, torch.load(folder / "ends.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("epoch", RESUMED)
@pytest.mark.parametrize("case", CASES)
def test_lightnings_own_checkpoint_continues_bit_for_bit_in_a_fresh_process(case, epoch, resumed):
    whole, ends = resumed
    assert same_state(ends[f"{case}, {epoch}"], whole[case])


class Places:
    """A loader that can be resumed in the middle of an epoch, as Lightning asks."""

    def __init__(self):
        self.place = 0
        self.batches = list(loader(shuffle=False))

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        begin = self.place % len(self)
        for index in range(begin, len(self)):
            self.place = index + 1
            yield self.batches[index]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Save(lightning.Callback):
    """Save in the middle of an epoch."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/middle.ckpt")


def test_a_loader_that_resumes_lets_a_run_go_on_in_the_middle_of_an_epoch(tmp_path):
    ends = []
    for seed, resume in ((3, None), (4, tmp_path / "3" / "middle.ckpt")):
        torch.manual_seed(seed)
        module, callback = Module(), HandoverCallback(plan(gate=GumbelSoftmax(), backbone="train"))
        fit(module, [callback, Save()], tmp_path / str(seed), Places(), resume, accumulate_grad_batches=1, max_epochs=2)
        ends.append(module.state_dict())
    assert same_state(*ends)


def test_early_stopping_counts_from_takeover_on(tmp_path):
    """Every evaluation is worse than the one before; those of the blend would stop it in the second epoch."""

    class Worse(Module):
        def validation_step(self, batch, batch_idx):
            self.log("validation", float(self.trainer.global_step))

    stopping = lightning.pytorch.callbacks.EarlyStopping("validation", patience=1)
    callback = HandoverCallback(plan())  # takes over after 6 of 12 steps, in the second of four epochs
    run = fit(Worse(0.0), [callback, stopping], tmp_path)
    assert run.global_step == callback.handover.steps_done == 9
    assert stopping.stopped_epoch == 2


BAD, KEPT = 14, 12
GUARD = segue.Guard(warmup=4, window=6, every=4, recovery=4, alpha=0.2)
FALLING = plan(schedule=Linear(until=0.9))


class Explode(lightning.Callback):
    """Make a student a thousand times too large before a step."""

    def on_train_batch_start(self, trainer, pl_module, *_):
        if trainer.global_step == BAD:
            explode(pl_module.model)


@torch.no_grad()
def explode(model):
    for parameter in model.blocks[1].attn.student.parameters():
        parameter.mul_(1e3)


def test_a_guarded_lightning_run_is_a_guarded_loop_of_ones_own(tmp_path):
    module, callback = Module(0.0), HandoverCallback(FALLING, guard=GUARD)
    changes = {"accumulate_grad_batches": 1, "max_epochs": 2}
    fit(module, [callback, Explode()], tmp_path, loader(shuffle=False), **changes)
    model = Net().train()
    handover = segue.replace_(model, FALLING, total_steps=20)
    optimizer = torch.optim.AdamW(handover.parameters(), lr=1e-2)
    guard = GUARD.watch(handover, optimizer)
    for step, (x, y) in enumerate([*loader(shuffle=False)] * 2):
        if step == BAD:
            explode(model)
        loss = F.cross_entropy(model(x), y) + handover.aux_loss()
        loss.backward()
        if guard(loss):
            optimizer.step()
        optimizer.zero_grad()
        handover.step()
    assert [(event["step"], event["restored"]) for event in guard.events] == [(BAD, KEPT)]
    assert callback.events == guard.events
    assert handover.raised == callback.handover.raised != {}
    assert same_state(module.model.state_dict(), handover.finalize_().state_dict())


def test_a_guarded_lightning_run_resumes_bit_for_bit_before_and_after_a_restore(tmp_path):
    def run(folder, resume=None):
        torch.manual_seed(3 if resume is None else 4)
        module, callback = Module(), HandoverCallback(FALLING, guard=GUARD)
        changes = {"accumulate_grad_batches": 1, "max_epochs": 4, "limit_train_batches": 5}
        fit(module, [callback, Explode()], tmp_path / folder, resume=resume, **changes)
        return module.state_dict(), callback.events

    whole, events = run("whole")
    assert [(event["step"], event["restored"]) for event in events] == [(BAD, KEPT)]
    for epoch in (1, 2):  # after 10 and 15 steps
        again, found = run(f"from {epoch}", tmp_path / "whole" / f"epoch={epoch}.ckpt")
        assert found == events
        assert same_state(again, whole)


def test_a_run_that_stops_before_takeover_is_left_open(tmp_path):
    callback = HandoverCallback(plan(schedule=Constant(alpha=0.5)))
    with pytest.warns(SegueWarning, match="stays open: at step 12 of 12 3 of 3 teachers still have a share"):
        fit(Module(), [callback], tmp_path)
    assert callback.handover.finalize_(force=True).segue["step"] == STEPS


def test_a_pretrained_model_in_evaluation_is_trained(tmp_path):
    """Lightning leaves modes as they are; the students would learn nothing from their guidance."""
    module, callback = Module(), HandoverCallback(plan())
    module.model.eval()
    run = fit(module, [callback], tmp_path)
    assert run.logged_metrics["aux_loss"] > 0


def test_a_place_that_lightning_does_not_find_again_is_said(tmp_path):
    fit(Module(), [HandoverCallback(plan())], tmp_path, max_epochs=-1, max_steps=12)
    place = tmp_path / "epoch=0.ckpt"
    with pytest.warns(SegueWarning, match="Give max_epochs instead"):
        fit(Module(), [HandoverCallback(plan())], tmp_path / "again", resume=place, max_epochs=-1, max_steps=12)


# What is refused


def test_a_module_without_that_part_is_refused(tmp_path):
    with pytest.raises(HandoverError) as error:
        fit(Module(), [HandoverCallback(plan(), module="net")], tmp_path)
    assert str(error.value) == (
        "Module.net is not a model.\n"
        "  The module has these parts: model.\n"
        "  Hint: create the model in __init__ and name it: HandoverCallback(plan, module='...')."
    )


def test_manual_optimization_is_refused(tmp_path):
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(HandoverError, match="does not support manual optimization"):
        fit(module, [HandoverCallback(plan())], tmp_path, accumulate_grad_batches=1)


def test_a_run_without_an_end_is_refused(tmp_path):
    with pytest.raises(HandoverError, match="a handover needs to know the number of steps"):
        fit(Module(), [HandoverCallback(plan())], tmp_path, max_epochs=-1)


def test_a_checkpoint_of_another_plan_is_refused(tmp_path):
    fit(Module(), [HandoverCallback(plan())], tmp_path)
    with pytest.raises(CheckpointError, match="Saved -> given: plan.seed: 0 -> 1"):
        fit(Module(), [HandoverCallback(plan(seed=1))], tmp_path / "other", resume=tmp_path / "epoch=0.ckpt")
    allowed = HandoverCallback(plan(seed=1), allow_changes=("plan.seed",), finalize=False)
    fit(Module(), [allowed], tmp_path / "other", resume=tmp_path / "epoch=0.ckpt")
    assert allowed.handover.steps_done == allowed.handover.total_steps
