"""What is finalized and saved is rebuilt in a fresh process, from the files alone: operators, and fewer layers."""

from pathlib import Path

import pytest
import torch
from torch import nn

import segue
from segue.students import OneLayer, Performer, WindowedLinear
from tests.helpers.processes import run_python
from tests.helpers.tiny import SITES, Net, batch, optimizer_for, start, train
from tests.students.attention import tiny_attention  # noqa: F401  registers the attention of tiny.Net

PLANS = {
    "random directions": segue.Plan(sites=SITES, student=Performer(features=6)),
    "learned maps": segue.Plan(sites=SITES, student=WindowedLinear(window=2)),
    "fewer layers": segue.Plan(sites=segue.Span("blocks", every=2), student=OneLayer()),
}
SCRIPT = """
import sys, torch, segue
from tests.helpers.tiny import Net, batch
from tests.students.attention import tiny_attention
for folder in sys.argv[1:]:
    model = segue.load_(Net(seed=1, depth=4).eval(), folder)
    torch.save(model(batch()[0]), folder + "/output.pt")
assert "transformers" not in sys.modules
"""


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return what each model returns here and in the other process; one process loads them all."""
    folders, outputs = [], []
    for name, plan in PLANS.items():
        handover = start(plan, total_steps=2, depth=4)
        train(handover, optimizer_for(handover), 2)
        model: nn.Module = handover.finalize_(force=True).eval()
        folders.append(tmp_path_factory.mktemp(name.replace(" ", "_")))
        segue.save(model, folders[-1])
        outputs.append(model(batch()[0]).detach())
    run_python("-c", SCRIPT, *folders, cwd=Path(__file__).parents[2])
    there = [torch.load(folder / "output.pt", weights_only=True) for folder in folders]
    return dict(zip(PLANS, zip(outputs, there, strict=True), strict=True))


@pytest.mark.processes
@pytest.mark.parametrize("name", PLANS)
def test_it_returns_the_same_in_a_fresh_process(name, rebuilt):
    here, there = rebuilt[name]
    assert torch.equal(here, there)
    assert not torch.equal(here, Net(seed=1, depth=4).eval()(batch()[0]))
