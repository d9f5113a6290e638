"""FLOPs: what is counted beforehand is what the steps of a real training cost."""

import pytest
import torch
from fit_cases import CountedBatches
from tiny import SITES, Net
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import segue
from segue.diagnostics.counting import StepCosts, flops
from segue.evaluation import Classification
from segue.recipe import Recipe

TOTAL = 10  # aggr20 takes over at step 2, halo at 3, lolcats at 5
CHOSEN = (0, 1, 6)
LINEAR = segue.schedules.Linear(start=0.9)


class Metered(CountedBatches):
    """Batches that count the operations from one batch to the next, which is a whole step of the loop."""

    def __init__(self, steps) -> None:
        super().__init__(count=TOTAL)
        self.steps = steps
        self.found: dict[int, int] = {}

    def __iter__(self):
        for step, batch in enumerate(self.batches):
            if step not in self.steps:
                yield batch
                continue
            with FlopCounterMode(display=False) as counter:
                yield batch
            self.found[step] = int(counter.get_total_flops())


def measured(plan, steps):
    """Train for real and return what these steps cost."""
    batches = Metered(steps)
    with sdpa_kernel(SDPBackend.MATH):  # the CPU's fused attention is not counted
        segue.fit(Net(), plan, batches, Classification(), recipe=Recipe(steps=TOTAL), progress=None)
    return batches.found


PLANS = {
    **{name: method(sites=SITES) for name, method in segue.methods.ALL.items()},
    "theseus to the end": segue.methods.theseus(sites=SITES, schedule=LINEAR, seed=1),
    "theseus without the teacher's gradient": segue.methods.theseus(sites=SITES, schedule=LINEAR, teacher_gradient=False),
    "a hold, then guidance": segue.methods.dcr_dfg(
        sites=SITES, schedule=segue.schedules.Hold(fraction=0.3, then=segue.schedules.aggr20())
    ),
    "one site after the other": segue.methods.dcr_dfg(sites=SITES, schedule=segue.schedules.Staggered(then=LINEAR)),
    "everything trains": segue.methods.dcr_dfg(sites=SITES, train="all"),
    "everything trains, distilled": segue.methods.distillation(sites=SITES, train="all"),
    "a gradient through the teacher": segue.methods.dcr(sites=SITES, teacher_gradient=True),
}


@pytest.mark.parametrize("name", PLANS)
def test_every_step_costs_what_was_counted_beforehand(name):
    plan = PLANS[name]
    model = Net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    count = StepCosts(model, plan, TOTAL, CountedBatches().batches[0], Classification())
    steps = range(TOTAL - 1) if "theseus" in name else CHOSEN
    assert {step: count[step].flops for step in steps} == measured(plan, steps)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert not any(type(module).__name__ == "Seam" for module in model.modules())


def test_the_order_of_asking_does_not_matter():
    plan = PLANS["theseus to the end"]
    ask = StepCosts(Net(), plan, TOTAL, CountedBatches().batches[0], Classification())
    backwards = [ask[step] for step in reversed(range(TOTAL))][::-1]
    ask = StepCosts(Net(), plan, TOTAL, CountedBatches().batches[0], Classification())
    assert [ask[step] for step in range(TOTAL)] == backwards


def test_counting_draws_nothing_from_the_global_generator():
    before = torch.get_rng_state()
    count = StepCosts(Net(dropout=0.5), PLANS["theseus"], TOTAL, CountedBatches().batches[0], Classification())
    assert count[1].flops > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_the_parts_of_a_step_are_those_of_plain_models():
    batch = CountedBatches().batches[0]
    count = StepCosts(Net(), PLANS["distillation"], TOTAL, batch, Classification())
    loss = Classification()
    plain = Net()
    with torch.no_grad():
        forward = flops(lambda: loss(plain, batch))
    assert count.teacher_pass() == forward
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(".attn." in name)
    trained = [p for p in plain.parameters() if p.requires_grad]
    alone = flops(lambda: torch.autograd.grad(loss(plain, batch), trained))
    assert count.students_alone().flops == alone
    assert count[5].flops == alone + forward  # distillation: the students' step, and one pass of the original
