"""Surgery: which models and sites it takes, and modules with several names."""

import pytest
import torch
from torch import nn

import segue
from segue.errors import HandoverError
from tests.helpers.tiny import SITES, Attention, Net, batch, optimizer_for, start, train


def test_wrapped_models_are_refused():
    for wrap in (torch.compile, nn.DataParallel):
        with pytest.raises(HandoverError, match="call replace_ on the plain model first"):
            segue.replace_(wrap(Net()), segue.Plan(sites="**.attn"))
    with pytest.raises(HandoverError, match="give the nn.Module itself"):
        segue.replace_("model", segue.Plan(sites="x"))


def test_shared_modules_are_replaced_under_every_name():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Attention(8)
            self.second = self.first
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.second(self.first(x)).mean(1))

    model = Shared().train()
    keys = list(model.state_dict())
    handover = segue.replace_(model, segue.Plan(sites="first"), total_steps=5)
    assert model.first is model.second
    train(handover, optimizer_for(handover), 5)
    handover.finalize_()
    assert model.first is model.second
    assert isinstance(model.first, Attention)
    assert list(model.state_dict()) == keys


def test_a_site_that_no_forward_calls_is_an_error():
    class Unused(Net):
        def forward(self, x):
            return self.head(self.blocks[0](x).mean(1))

    with pytest.raises(HandoverError) as error:
        segue.replace_(Unused(), segue.Plan(sites=SITES), example=batch()[0])
    assert str(error.value) == (
        "the model does not call site 'blocks.1.attn'.\n"
        "  Its module is unused, or another path of the code computes its work.\n"
        "  Hint: choose sites that every forward calls, or plan with unreached='ignore' for experts and skipped layers."
    )
    model = Unused()
    segue.replace_(model, segue.Plan(sites=SITES))
    with pytest.raises(HandoverError, match="site 'blocks.1.attn'"):
        model(batch()[0])
    lenient = Unused()
    segue.replace_(lenient, segue.Plan(sites=SITES, unreached="ignore"))
    lenient(batch()[0])


def test_a_second_handover_in_one_model_is_refused():
    model = start().model
    with pytest.raises(HandoverError) as error:
        segue.replace_(model, segue.Plan(sites="head"))
    assert str(error.value) == (
        "a model can have one handover at a time.\n"
        "  Another one is running in this model; it has a seam at 'blocks.0.attn'.\n"
        "  Hint: put all sites in one plan (PerSite gives them schedules of their own), or finish the first."
    )
