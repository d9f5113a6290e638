"""Deep copies and pickles of a running handover and of its model."""

import copy
import io
import pickle

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import segue
from segue.core.verify import _listening
from segue.errors import HandoverError, SegueWarning
from segue.losses import FeatureGuidance, LogitDistillation
from segue.schedules import Linear
from tests.helpers.tiny import SITES, batch, constant, optimizer_for, same_bits, same_state, start, train

PLANS = {
    "a blend": {"schedule": Linear(start=0.9)},
    "coins and guidance": {"gate": segue.gates.Bernoulli(), "guidance": FeatureGuidance()},
    "everything trains": {"train": "all", "distill": LogitDistillation()},
    "a span": {"sites": segue.Span("blocks", every=3)},
}


def running(name):
    handover = start(segue.Plan(**{"sites": SITES, **PLANS[name]}))
    train(handover, optimizer_for(handover), 2)
    handover.model(batch(2)[0])  # its outputs wait for the losses, with a graph
    return handover


def through_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


def through_torch(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch])
@pytest.mark.parametrize("name", PLANS)
def test_the_twin_of_a_handover_runs_on_its_own_bit_for_bit(name, copied):
    handover = running(name)
    twin = copied(handover)
    assert twin.model is not handover.model
    assert repr(twin) == repr(handover)
    assert not {id(p) for p in twin.model.parameters()} & {id(p) for p in handover.model.parameters()}
    handover.auxiliary.clear()
    alone = train(twin, optimizer_for(twin), 3)
    assert handover.steps_done == 2
    assert train(handover, optimizer_for(handover), 3) == alone
    assert same_state(twin.finalize_(force=True).state_dict(), handover.finalize_(force=True).state_dict())
    assert not twin.model._forward_hooks


@pytest.mark.parametrize("copied", [through_pickle, through_torch])
def test_a_model_is_pickled_with_its_handover(copied):
    handover = running("a blend")
    twin = copied(handover.model)
    x, _ = batch()
    assert same_bits(twin(x), handover.model(x))
    handover.model.eval()
    assert twin.training
    with pytest.raises(HandoverError, match="a model can have one handover at a time"):
        segue.replace_(twin, segue.Plan(sites="head"))


def test_the_copy_of_a_model_says_that_it_stands_still():
    handover = running("a blend")
    with pytest.warns(SegueWarning) as said:
        twin = copy.deepcopy(handover.model)
    assert [str(warning.message) for warning in said] == [
        "the copy of a model in a handover does not follow it: it stays as it is now, Handover(Net, 3 sites, step 2 of 10, "
        "alpha 0.72). To keep an average of the weights, or to train both, copy the handover "
        "(twin = copy.deepcopy(handover), twin.model) and call step() on both."
    ]
    x, _ = batch()
    before = handover.model(x)
    assert same_bits(twin(x), before)
    handover.auxiliary.clear()
    handover.step()
    assert same_bits(twin(x), before)
    twin.eval()
    assert handover.model.training
    with pytest.warns(SegueWarning, match="does not follow it"):
        AveragedModel(handover.model)


def test_twins_watch_their_own_optimizers():
    handover = start()
    twin = copy.deepcopy(handover)
    torch.optim.SGD(twin.model.head.parameters(), lr=0.1).step()
    handover.step()
    with pytest.raises(HandoverError, match="the optimizer does not hold the students"):
        twin.step()
    ended = copy.deepcopy(handover)
    ended.cancel_()
    assert copy.deepcopy(ended)._optimizers not in _listening


def test_a_plan_that_pickle_cannot_take_is_named():
    handover = start(segue.Plan(sites=SITES, schedule=lambda progress, site: 0.5))
    for thing in (handover, handover.model):
        with pytest.raises(HandoverError) as error:
            pickle.dumps(thing)
        first, found, hint = str(error.value).splitlines()
        assert first == "a model in a handover cannot be pickled with this plan."
        assert found.startswith("  Pickle cannot take schedule=<function ")
        assert hint == (
            "  Hint: save it with segue.save(handover, folder), or the model after finalize_(); or define that function "
            "at the top of a module."
        )
    pickle.dumps(handover.finalize_(force=True))


def test_a_copy_taken_in_a_view_keeps_it():
    handover = start(segue.Plan(sites=SITES, schedule=constant(0.5)))
    x, _ = batch()
    with handover.as_student() as model:
        students, twin = model(x), copy.deepcopy(handover)
    assert same_bits(twin.model(x), students)
    assert not same_bits(handover.model(x), students)
