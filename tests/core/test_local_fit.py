"""The local fit against today's step with alpha held at 1, against a regression written by hand, and what it refuses."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import segue
from segue.errors import HandoverError
from segue.losses import CosineGuidance, FeatureGuidance, OnTeacherStream
from segue.phases import Phase
from tests.helpers.models import CASES
from tests.helpers.tiny import SITES, Net, batch, optimizer_for, same_bits, same_state, start


def plan(sites=SITES, guidance=None, **local) -> segue.Plan:
    phases = (Phase(name="local fit", length=0.5, local=True, **local), Phase(name="students alone"))
    return segue.Plan(sites=sites, guidance=guidance or FeatureGuidance(), phases=phases)


def students(handover):
    return {name: parameter.detach().clone() for name, parameter in handover.named_parameters()}


def fit(handover, optimizer, x, mask=None, **asked):
    with handover.features(mask) as features:
        handover.model(x)
    losses = []
    for loss in features.losses(**asked):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    handover.step()
    return losses


@pytest.mark.parametrize("guidance", [FeatureGuidance(weight=0.5), CosineGuidance(), OnTeacherStream()])
def test_one_update_per_batch_is_the_step_with_alpha_held_at_1(guidance):
    held, fitted = (start(plan(guidance=guidance), dropout=0.1) for _ in range(2))
    for handover in (held, fitted):
        optimizer = optimizer_for(handover)
        for step in range(4):
            x, y = batch(step)
            torch.manual_seed(step)
            if handover is fitted:
                fit(handover, optimizer, x)
                continue
            (F.cross_entropy(handover.model(x), y) + handover.aux_loss()).backward()
            optimizer.step()
            optimizer.zero_grad()
            handover.step()
    assert same_state(students(held), students(fitted))
    assert not same_state(students(held), students(start(plan(guidance=guidance))))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_features_of_every_family_are_those_of_a_forward(case):
    handover = segue.replace_(case.build().train(), plan(case.sites), total_steps=4)
    batch = case.batch()
    torch.manual_seed(0)
    handover.model(*batch.args, **batch.kwargs)
    expected = handover.aux_loss(batch.mask)
    with handover.features(batch.mask) as features:
        handover.model(*batch.args, **batch.kwargs)
    torch.manual_seed(0)
    (found,) = features.losses()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # torch's fused attention rounds otherwise
    gradients = [torch.autograd.grad(loss, list(handover.parameters()), allow_unused=True) for loss in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["HF GPT-2", "HF Llama layers", "torch encoder", "HF BERT", "shared layers"])
def test_sub_batches_average_to_the_batch(name):
    case = next(case for case in CASES if case.name == name)
    handover = segue.replace_(case.build().train(), plan(case.sites), total_steps=4)
    for seam in handover.seams.values():
        seam.eval()  # no dropout
    batch = case.batch()
    with handover.features(batch.mask) as features:
        handover.model(*batch.args, **batch.kwargs)
    rows = features.rows
    parts = [loss.item() * len(range(index, rows, 2)) / rows for index, loss in enumerate(features.losses(split=2))]
    (whole,) = features.losses()
    assert len(parts) == 2
    assert sum(parts) == pytest.approx(whole.item(), rel=1e-4)


def test_it_is_a_regression_written_by_hand():
    """Bit for bit: AdamW on the mean over samples of |s - t|^2 / |t|^2, site by site, on every third row, twice."""
    handover = start(plan())
    original = Net().eval()
    by_hand = {name: copy.deepcopy(seam.student) for name, seam in handover.seams.items()}
    optimizers = {name: torch.optim.AdamW(student.parameters(), lr=1e-2) for name, student in by_hand.items()}
    optimizer = optimizer_for(handover)
    losses, expected = [], []
    for step in range(3):
        x, _ = batch(step, size=7)
        losses += fit(handover, optimizer, x, split=3, reuse=2)
        features = {}
        hooks = [
            original.get_submodule(name).register_forward_hook(
                lambda _m, args, out, name=name, to=features: to.update({name: (args[0], out)})
            )
            for name in by_hand
        ]
        with torch.no_grad():
            original(x)
        for hook in hooks:
            hook.remove()
        for _ in range(2):
            for part in range(3):
                total = 0.0
                for name, student in by_hand.items():
                    inputs, targets = (each[part::3] for each in features[name])
                    error = (student(inputs) - targets).square().sum(-1).mean(1) / targets.square().sum(-1).mean(1)
                    error.mean().backward()
                    optimizers[name].step()
                    optimizers[name].zero_grad()
                    total += error.mean().item()
                expected.append(total)
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, student in by_hand.items():
        assert same_state(student.state_dict(), handover.seams[name].student.state_dict())


def test_a_batch_of_fewer_samples_has_one_update_for_each():
    handover = start(plan())
    assert len(fit(handover, optimizer_for(handover), batch(size=2)[0], split=4, reuse=3)) == 6


def test_the_phase_says_how_often_and_the_call_may_say_otherwise():
    handover = start(plan(split=2, reuse=3))
    optimizer = optimizer_for(handover)
    assert len(fit(handover, optimizer, batch()[0])) == 6
    assert len(fit(handover, optimizer, batch()[0], reuse=1)) == 2


def test_a_loop_that_forgets_step_is_still_noticed():
    handover = start(plan(split=4, reuse=8))
    optimizer = optimizer_for(handover)
    assert len(fit(handover, optimizer, batch()[0])) == 32
    for parameter in handover.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(HandoverError, match="without a handover.step"):
        for _ in range(20):
            optimizer.step()


def test_padding_is_cut_with_its_rows():
    handover = start(plan())
    x, _ = batch()
    mask = torch.ones(8, 5)
    mask[::2, 3:] = 0
    with handover.features(mask) as features:
        handover.model(x)
    even, odd = (loss.item() for loss in features.losses(split=2))
    for rows, found in ((slice(0, None, 2), even), (slice(1, None, 2), odd)):
        handover.model(x[rows])
        assert found == pytest.approx(handover.aux_loss(mask[rows]).item(), rel=1e-5)


def test_a_site_that_is_near_enough_rests():
    handover = start(plan(tolerance=0.5))
    with torch.no_grad():  # one student is its teacher
        for teacher, student in zip(
            handover.seams["blocks.1.attn"].teacher.parameters(),
            handover.seams["blocks.1.attn"].student.parameters(),
            strict=True,
        ):
            student.copy_(teacher)
    optimizer = optimizer_for(handover)
    fit(handover, optimizer, batch()[0])
    assert handover.local.fitted(0.5) == {"blocks.1.attn"}
    before, calls = students(handover), []
    handover.seams["blocks.1.attn"].student.register_forward_hook(lambda *_: calls.append(1))
    fit(handover, optimizer, batch(1)[0])
    after = students(handover)
    assert not calls
    for name in before:
        assert same_bits(before[name], after[name]) == name.startswith("blocks.1.")


def test_a_run_in_which_all_sites_rest_takes_no_update():
    handover = start(plan(tolerance=100.0))
    optimizer = optimizer_for(handover)
    fit(handover, optimizer, batch()[0])
    assert fit(handover, optimizer, batch()[0]) == []


def test_the_running_error_is_a_mean_over_steps():
    handover = start(plan(tolerance=1e-6))
    optimizer = optimizer_for(handover)
    running = {}
    for step in range(3):
        x, _ = batch(step)
        with torch.no_grad(), handover.features() as features:
            handover.model(x)
        for name, (call,) in features.calls.items():
            t, s = call.output, handover.seams[name].student(*call.args)
            t = t if isinstance(t, torch.Tensor) else t[0]
            error = ((s - t).square().sum((1, 2)) / t.square().sum((1, 2))).mean().sqrt().item()
            running[name] = 0.9 * running.get(name, error) + 0.1 * error
        fit(handover, optimizer, x)
        assert handover.local.errors == pytest.approx(running, rel=1e-5)
    for _ in range(3):
        handover.step()
    assert handover.local.errors == {}  # of the phase that has ended


class InPlace(nn.Module):
    """Change what the site was called with, and what it returned, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.site = nn.Linear(8, 8)

    def forward(self, x):
        x = x + 0.0
        y = self.site(x)
        kept = y + 0.0
        x.mul_(0.0)
        y.mul_(0.0)
        return kept


def test_code_that_changes_tensors_in_place_does_not_change_features():
    handover = segue.replace_(InPlace().train(), plan("site"), total_steps=4)
    x = torch.randn(4, 8)
    with handover.features() as features:
        handover.model(x)
    (call,) = features.calls["site"]
    assert same_bits(call.args[0], x)
    assert same_bits(call.output, handover.seams["site"].teacher(x))


class Mixing(nn.Module):
    """A layer over (tokens, batch, features), or one whose samples depend on each other."""

    def forward(self, x):
        return x.softmax(0)


def test_a_site_that_mixes_samples_is_not_cut():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), Mixing())).train()
    handover = segue.replace_(model, plan("1"), total_steps=4)
    x = torch.randn(6, 8)
    with handover.features() as features:
        model(x)
    assert len(list(features.losses(reuse=2))) == 2
    with pytest.raises(HandoverError, match="a batch cannot be cut at site '1'") as caught:
        list(features.losses(split=2))
    assert "split=1" in str(caught.value)


class Biased(nn.Module):
    """A layer with a bias between tokens, which is no tensor of samples, whatever its size is."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x, bias):
        return self.proj((bias @ x).tanh())


class WithBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.site = Biased()

    def forward(self, x):
        return self.site(x, torch.linspace(-1, 1, x.shape[1] ** 2).view(x.shape[1], -1))


def test_a_batch_with_as_many_samples_as_tokens_is_looked_at_again():
    """After batches that were cut rightly: in this one a tensor that is no row of the batch looks like one."""
    handover = segue.replace_(WithBias().train(), plan("site"), total_steps=4)
    found = []
    for samples in (1, 6, 5):
        with handover.features() as features:
            handover.model(torch.randn(samples, 5, 8))
        if samples == 5:
            with pytest.raises(HandoverError, match="a batch cannot be cut at site 'site'"):
                list(features.losses(split=2))
            continue
        found.append(len(list(features.losses(split=2))))
    assert found == [1, 2]


def test_the_output_of_a_student_is_compared_with_that_of_its_teacher():
    class Narrow(nn.Linear):
        def forward(self, x):
            return super().forward(x)[..., :4]

    settings = {"guidance": CosineGuidance(), "phases": plan().phases}
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).train()
    handover = segue.replace_(model, segue.Plan(sites="0", student=lambda *_: Narrow(8, 8), **settings), total_steps=4)
    with handover.features() as features:
        model(torch.randn(4, 8))
    with pytest.raises(segue.errors.StudentError, match="must return what its teacher returns"):
        list(features.losses())


def test_features_need_guidance_and_a_forward():
    with pytest.raises(HandoverError, match="features\\(\\) needs guidance"):
        start(segue.Plan(sites=SITES)).features()
    handover = start(plan())
    with handover.features() as features:
        pass
    with pytest.raises(HandoverError, match="has recorded nothing"):
        features.losses()
    assert not any(seam.teacher._forward_hooks for seam in handover.seams.values())


def test_several_processes_are_sent_to_fit(monkeypatch):
    handover = start(plan())
    with handover.features() as features:
        handover.model(batch()[0])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(HandoverError, match="is for one process"):
        features.losses()


@pytest.mark.parametrize("split", [1, 2])
def test_updates_compute_as_the_forward_did_when_autocast_has_ended(split):
    """Hugging Face's Trainer leaves autocast with the forward of the model."""
    found = []
    for ended in (False, True):
        handover = start(plan())
        with torch.autocast("cpu", torch.bfloat16):
            with handover.features() as features:
                handover.model(batch(0)[0])
            losses = [] if ended else list(features.losses(split=split))
        found.append(losses or list(features.losses(split=split)))
        assert all(call.output.dtype == torch.bfloat16 for calls in features.calls.values() for call in calls)
    assert same_bits(*(torch.stack(losses) for losses in found))
