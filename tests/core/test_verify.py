import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks_on_all_optimizers
from torch.optim.optimizer import register_optimizer_step_post_hook

import segue
from segue.core.verify import OptimizerWatch, _listening
from segue.errors import HandoverError, PlanError, VerificationError
from tests.helpers.tiny import SITES, Net, batch, constant, optimizer_for, same_state, start, train


class Whole(nn.Module):
    """A block that contains its residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x).tanh()


def deep(count: int = 12) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Whole() for _ in range(count)), nn.Linear(8, 3))


@pytest.mark.parametrize("name", segue.methods.ALL)
def test_a_sound_handover_passes_and_is_left_as_it_was(name):
    handover = start(segue.methods.ALL[name](sites=SITES), dropout=0.2)
    optimizer = optimizer_for(handover)
    train(handover, optimizer, 1)
    weights, state, randomness = copy.deepcopy(handover.model.state_dict()), repr(handover), torch.get_rng_state()
    flags = [{k: v for k, v in vars(seam).items() if not k.startswith("_")} for seam in handover.seams.values()]
    modes = [m.training for m in handover.model.modules()]
    report = handover.verify(batch()[0], optimizer=optimizer)
    assert report.passed
    assert len(report.checks) == 7
    assert same_state(handover.model.state_dict(), weights)
    assert repr(handover) == state
    assert torch.equal(torch.get_rng_state(), randomness)
    assert [{k: v for k, v in vars(s).items() if not k.startswith("_")} for s in handover.seams.values()] == flags
    assert [m.training for m in handover.model.modules()] == modes
    assert all(p.grad is None for p in handover.model.parameters())


def test_the_report_reads_well():
    handover = start()
    lines = str(handover.verify(batch()[0])).splitlines()
    assert lines == [
        "ok    every site is called",
        "ok    teacher-only equals the original model, bit for bit",
        "ok    student-only equals the finalized model, bit for bit",
        "ok    every student returns finite numbers where its teacher does",
        "ok    teachers are unchanged",
        "ok    every student parameter receives a finite gradient",
    ]


def failing(handover, says, *args, **kwargs):
    with pytest.raises(VerificationError, match=says) as error:
        handover.verify(*args, **kwargs)
    assert "checks failed" in str(error.value)


def test_a_changed_teacher_is_found():
    handover = start()
    with torch.no_grad():
        handover.seams["blocks.1.attn"].teacher.proj.bias.add_(1e-7)
    failing(handover, "FAIL  teachers are unchanged: blocks.1.attn", batch()[0])


def test_an_optimizer_without_the_students_is_found():
    handover = start()
    incomplete = torch.optim.SGD(list(handover.parameters())[1:], lr=0.1)
    failing(handover, "holds every trained parameter: blocks.0.attn.qkv.weight", batch()[0], optimizer=incomplete)


def test_a_parameter_without_a_gradient_is_found():
    def student(teacher, site):
        made = segue.students.Reinit()(teacher, site)
        made.idle = nn.Parameter(torch.zeros(3))
        return made

    handover = start(segue.Plan(sites=SITES, student=student))
    failing(handover, "blocks.0.attn.idle received none", batch()[0])


def test_a_student_that_gives_nan_is_found():
    handover = start()
    with torch.no_grad():
        handover.seams["blocks.2.attn"].student.qkv.weight.fill_(float("nan"))
    failing(
        handover, "FAIL  every student returns finite numbers where its teacher does: blocks.2.attn; FAIL  every", batch()[0]
    )


def test_a_site_that_is_passed_by_is_found():
    class Skips(Net):
        def forward(self, x):
            return self.head(self.blocks[0](x).mean(1))

    handover = segue.replace_(Skips().train(), segue.Plan(sites=SITES), total_steps=3)
    failing(handover, "FAIL  every site is called: blocks.1.attn; blocks.2.attn", batch()[0])
    handover = segue.replace_(Skips(depth=6).train(), segue.Plan(sites=SITES), total_steps=3)
    failing(handover, r"is called: blocks\.1\.attn; blocks\.2\.attn; blocks\.3\.attn\.\s", batch()[0])  # the first three


def test_gradient_norms_are_those_of_a_random_direction_at_half_the_weight():
    model = nn.Sequential(nn.Linear(4, 4)).double()
    handover = segue.replace_(model, segue.Plan(sites="0"), total_steps=3)
    x = torch.randn(5, 4, dtype=torch.float64)
    direction = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double() / 2
    expected = torch.cat([(direction.T @ x).flatten(), direction.sum(0)]).norm().item()
    assert handover.verify(x).gradient_norms["0"] == pytest.approx(expected, rel=1e-5)


def test_a_model_that_returns_more_without_seams_is_found():
    class Peeks(Net):
        def forward(self, x):
            logits = super().forward(x)
            return (logits,) if hasattr(self.blocks[0].attn, "student") else (logits, logits)

    handover = segue.replace_(Peeks().train(), segue.Plan(sites=SITES), total_steps=3)
    failing(handover, "equals the original model, bit for bit: 1 output tensors instead of 2", batch()[0])


def test_a_model_without_any_gradient_starves_no_site():
    model = Net().train()
    torch.nn.init.zeros_(model.head.weight)
    report = segue.replace_(model, segue.Plan(sites=SITES), total_steps=3).verify(batch()[0])
    assert report.passed
    assert not report.warnings
    assert set(report.gradient_norms.values()) == {0.0}


def test_a_seam_that_is_bypassed_is_found():
    class Bypass(nn.Module):
        """Computes with a reference to the original module that the surgery cannot see."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.hidden = [self.layer]

        def forward(self, x):
            return self.hidden[0](x)

    handover = segue.replace_(Bypass().train(), segue.Plan(sites="layer"), total_steps=3)
    failing(handover, "every site is called: layer", batch()[0])


@pytest.mark.parametrize("change", [lambda y: y.nextafter(y + 1), lambda y: y * -0.0], ids=["the last bit", "the sign of zero"])
def test_a_difference_of_one_bit_is_found(change):
    class Rounds(nn.Module):
        """Takes another path where its layer is not the original one."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            y = self.layer(x)
            y = torch.stack([y, torch.zeros_like(y)])
            return y if type(self.layer) is nn.Linear else torch.where(y == 0, change(y), y)

    handover = segue.replace_(Rounds().train(), segue.Plan(sites="layer"), total_steps=3)
    failing(handover, "FAIL  teacher-only equals the original model, bit for bit: output 0 differs", batch()[0])


def test_starving_sites_are_measured_and_warned_of():
    model = deep().train()
    handover = segue.replace_(model, segue.Plan(sites="{0..11}"), total_steps=3)
    with pytest.warns(segue.SegueWarning, match=r"'0' first\) receive as little as .* Plan with teacher_gradient=True"):
        report = handover.verify(batch()[0])
    assert report.gradient_norms["0"] < 0.05 * report.gradient_norms["11"]
    passing = segue.replace_(deep().train(), segue.Plan(sites="{0..11}", teacher_gradient=True), total_steps=3)
    assert passing.verify(batch()[0]).warnings == []


def test_verification_works_in_the_middle_of_a_step():
    handover = start(segue.methods.dcr_dfg(sites=SITES, schedule=constant(0.5)))
    x, _ = batch()
    handover.model(x)
    handover.verify(x)
    assert handover.aux_loss().item() > 0
    handover.step()


def test_an_optimizer_built_before_the_surgery_is_noticed():
    model = Net().train()
    optimizer = torch.optim.AdamW(model.parameters())
    handover = segue.replace_(model, segue.Plan(sites=SITES), total_steps=10)
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    optimizer.step()
    with pytest.raises(HandoverError) as error:
        handover.step()
    assert str(error.value) == (
        "the optimizer does not hold the students.\n"
        "  It holds other parameters of this model: it was built before replace_.\n"
        "  Hint: build it after replace_: torch.optim.AdamW(handover.parameters(), ...)."
    )


def test_an_optimizer_of_another_model_and_two_optimizers_are_fine():
    handover = start(segue.Plan(sites=SITES, train="all"))
    students = torch.optim.SGD([p for seam in handover.seams.values() for p in seam.student.parameters()], lr=0.1)
    others = [torch.optim.SGD(handover.model.head.parameters(), lr=0.1), torch.optim.SGD(Net().parameters(), lr=0.1)]
    for _ in range(3):
        F.cross_entropy(handover.model(batch()[0]), batch()[1]).backward()
        for optimizer in (students, *others):
            optimizer.step()
            optimizer.zero_grad()
        handover.step()


def test_a_forgotten_step_is_noticed():
    handover = start()
    optimizer = optimizer_for(handover)
    steps = 0
    with pytest.raises(HandoverError) as error:
        while steps < 20:
            steps += 1
            F.cross_entropy(handover.model(batch()[0]), batch()[1]).backward()
            optimizer.step()
    assert steps == 9
    assert str(error.value) == (
        "the optimizer has stepped 9 times without a handover.step().\n"
        "  Alpha stands still: the handover is at step 0.\n"
        "  Hint: call handover.step() after every optimizer.step()."
    )


def test_dropped_handovers_listen_no_more():
    gc.collect()
    kept = start()
    before, hooks = len(_listening), len(hooks_on_all_optimizers)
    for _ in range(2000):
        OptimizerWatch(kept.model, []).listen()
    for _ in range(30):
        segue.replace_(nn.Sequential(nn.Linear(2, 2)), segue.Plan(sites="0"), total_steps=4)
    gc.collect()
    assert (len(_listening), len(hooks_on_all_optimizers)) == (before, hooks)
    foreign = torch.optim.SGD(kept.model.head.parameters(), lr=0.1)
    foreign.step()
    with pytest.raises(HandoverError, match="the optimizer does not hold the students"):
        kept.step()
    kept.cancel_()
    assert len(_listening) == before - 1


def test_a_handover_that_is_freed_during_an_optimizer_step_disturbs_nothing():
    mine = register_optimizer_step_post_hook(lambda *_: gc.collect())
    try:
        handover = start()
        start()  # dropped at once; a cycle, so that the collector frees it
        optimizer = optimizer_for(handover)
        train(handover, optimizer, 2)
    finally:
        mine.remove()


def test_a_model_and_its_handover_are_freed_together():
    handover = start(segue.methods.dcr_dfg(sites=SITES))
    train(handover, optimizer_for(handover), 1)
    handover.model(batch()[0])  # its outputs wait for the guidance
    references = [weakref.ref(x) for x in (handover, handover.model, handover.seams["blocks.0.attn"], handover._optimizers)]
    del handover
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


@pytest.mark.parametrize("given", [(), ((batch()[0],),), (batch(),)])
def test_arguments_that_the_model_does_not_take_are_explained(given):
    handover = start()
    with pytest.raises(PlanError) as error:
        handover.verify(*given)
    wrong, found, hint = str(error.value).splitlines()
    assert wrong == "the model cannot be called with the arguments of verify()."
    assert found.startswith("  It raises ")
    assert hint.startswith("  Hint: call it as the model: model(images) is handover.verify(images)")


def test_a_handover_may_begin_while_others_are_told_of_a_step():
    class Beginning(OptimizerWatch):
        def stepped(self, optimizer):
            begun.append(start())

    begun, handover = [], start()
    watch = Beginning(handover.model, [])
    watch.listen()
    optimizer_for(handover).step()
    watch.stop()
    assert len(begun) == 1
