"""A change of the model that fails at any line of Segue's code leaves the model, or the running handover, as it was."""

import copy
import gc
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import segue
from segue.core import handover as handover_module
from segue.core.transaction import all_or_nothing
from segue.core.verify import _listening
from tests.helpers.tiny import SITES, Attention, Net, batch, constant, optimizer_for, same_bits, same_state, train
from tests.torture.wrong_calls import fingerprint

CORE = str(Path(handover_module.__file__).parent)
WATCHED = (
    "handover.py",
    "surgery.py",
    "span.py",
    "shortening.py",
    "rebuilding.py",
    "backbone.py",
    "building.py",
    "seam.py",
    "verify.py",
    "auxiliary.py",
)


class PulledPlugError(BaseException):
    """As KeyboardInterrupt, which a debugger would take for its own."""


def interrupted_at_every_line(prepare, act):
    """Interrupt a call at the first execution of each line of the core, one by one; yield what it was prepared with.

    The last one is not interrupted.
    """
    done: set[tuple[str, int]] = set()
    while True:
        case = prepare()
        hit = False

        def trace(frame, event, _):
            nonlocal hit
            folder, _, name = frame.f_code.co_filename.rpartition("/")
            if folder != CORE or name not in WATCHED:
                return None
            place = name, frame.f_lineno
            if event == "line" and place not in done:
                done.add(place)
                hit = True
                raise PulledPlugError(f"{name}:{frame.f_lineno}")
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            act(case)
        except PulledPlugError as error:
            assert hit
            place = str(error)
        finally:
            sys.settrace(before)
        if not hit:
            assert len(done) > 20
            return
        yield case, place


def structure(model):
    """Identify every module under all its names, every hook and every parameter."""
    modules = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
    hooks = {name: (*module._forward_hooks, *module._forward_pre_hooks) for name, module in model.named_modules()}
    parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    return list(modules.items()), list(hooks.items()), list(parameters.items()), fingerprint(model)


class Shared(Net):
    """A network whose first attention has a second name, with a configuration that counts its blocks."""

    class Config:
        num_hidden_layers = 2

    def __init__(self, plan: str = "sites") -> None:
        super().__init__(depth=2)
        if plan == "sites":
            self.again = self.blocks[0].attn
        self.config = self.Config()
        self.blocks[1].attn.requires_grad_(False)
        self.blocks[1].mlp.eval()
        self.register_forward_hook(lambda *_: None)


class Configured(Net):
    """A network that is built from its configuration, as nanoGPT is."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(depth=config.num_hidden_layers)
        self.config = config
        for i, block in enumerate(self.blocks):
            block.layer_idx, block.first = i, i < config.first


def prepared(name: str) -> nn.Module:
    if name == "configured":
        return Configured(SimpleNamespace(num_hidden_layers=2, first=1, kinds=["a", "a"])).train()
    return Shared(name).train()


PLANS = {
    "sites": segue.Plan(sites=SITES, train="all", distill=segue.losses.LogitDistillation()),
    "spans": segue.Plan(sites=segue.Span("blocks"), student=segue.students.OneLayer(), guidance=segue.losses.FeatureGuidance()),
    "configured": segue.Plan(sites=segue.Span("blocks"), student=segue.students.OneLayer(which=1)),
}


@pytest.mark.parametrize("name", ["sites", "spans"])
def test_replace_interrupted_anywhere_leaves_the_model_as_it_was(name):
    plan, example = PLANS[name], batch(size=2)[0]
    model = prepared(name)
    gc.collect()
    before, listening = structure(model), len(_listening)
    count = 0
    for _, place in interrupted_at_every_line(
        lambda: model, lambda model: segue.replace_(model, plan, total_steps=4, example=example)
    ):
        assert structure(model) == before, place
        count += 1
    assert count > 100
    gc.collect()
    assert len(_listening) == listening + 1  # that of the last call, which was not interrupted


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("end", ["finalize_", "cancel_"])
def test_an_end_interrupted_anywhere_leaves_the_handover_running(name, end):
    def begin():
        handover = segue.replace_(prepared(name), PLANS[name], total_steps=4)
        train(handover, optimizer_for(handover), 2)
        return handover

    def act(handover):
        return handover.finalize_(force=True) if end == "finalize_" else handover.cancel_()

    undisturbed = act(begin()).state_dict()
    running = [begin()]
    before = structure(running[-1].model), fingerprint(running[-1])
    for handover, place in interrupted_at_every_line(lambda: running[-1], act):
        if handover._ended:  # the model had changed completely; what is left is to forget
            assert not handover.model._forward_pre_hooks, place
            running.append(begin())
            before = structure(running[-1].model), fingerprint(running[-1])
        assert (structure(running[-1].model), fingerprint(running[-1])) == before, place
    handover = running[-1]
    assert same_state(handover.model.state_dict(), undisturbed)
    assert handover.model.config.num_hidden_layers == (1 if name != "sites" and end == "finalize_" else 2)
    if name == "configured":
        config, layer = handover.model.config, handover.model.blocks[0]
        shortened = end == "finalize_"
        assert (config.first, config.kinds) == ((0, ["a"]) if shortened else (1, ["a", "a"]))
        assert (layer.layer_idx, layer.first) == (0, not shortened)  # the student is a copy of the second layer


def test_a_handover_goes_on_after_an_end_that_failed():
    def begin(student):
        return segue.replace_(Net(), segue.Plan(sites=SITES, student=student, schedule=constant(0.5)), total_steps=8)

    class Stubborn(Attention):
        def finished(self):
            raise RuntimeError("not yet")

    handover, undisturbed = begin(lambda *_: Stubborn(8)), begin(lambda *_: Attention(8))
    optimizers = optimizer_for(handover), optimizer_for(undisturbed)
    for one, optimizer in zip((handover, undisturbed), optimizers, strict=True):
        train(one, optimizer, 2)
    with pytest.raises(RuntimeError, match="not yet"):
        handover.finalize_(force=True)
    losses = [train(one, o, 2) for one, o in zip((handover, undisturbed), optimizers, strict=True)]
    assert losses[0] == losses[1]
    del Stubborn.finished
    x, _ = batch()
    assert same_bits(handover.finalize_(force=True)(x), undisturbed.finalize_(force=True)(x))


class Refuses(Attention):
    def train(self, mode: bool = True):
        raise RuntimeError("a student's train()")


def test_a_student_or_a_hook_of_the_model_that_fails_changes_nothing():
    model = Shared().train()
    before = structure(model)
    calls = iter([Attention, Refuses])
    with pytest.raises(RuntimeError, match=r"a student's train\(\)"):
        segue.replace_(model, segue.Plan(sites=SITES, student=lambda *_: next(calls)(8)))
    assert structure(model) == before

    def refuse(*_):
        raise RuntimeError("a hook of the state_dict")

    handle = model.register_state_dict_post_hook(refuse)
    before = structure(model)
    with pytest.raises(RuntimeError, match="a hook of the state_dict"):
        segue.replace_(model, segue.Plan(sites=SITES, train="all"))
    assert structure(model) == before
    handle.remove()


def test_a_transaction_restores_everything_but_the_values_of_tensors():
    model = Shared().train()
    before, config = structure(model), vars(model.config).copy()
    handle = model.register_forward_pre_hook(lambda *_: None)
    before_handle = structure(model)
    with pytest.raises(KeyboardInterrupt), all_or_nothing(model):
        handle.remove()
        del model.blocks[1]
        model.blocks.insert(0, nn.Identity())
        model.extra, model.train = nn.Linear(2, 2), None
        model.config.num_hidden_layers = 7
        del model.again
        model.head.weight.requires_grad_(False)
        model.head.bias = nn.Parameter(torch.zeros(3))
        raise KeyboardInterrupt
    assert structure(model) == before_handle
    assert vars(model.config) == config
    handle.remove()  # it still knows its hook
    assert structure(model) == before
    copy.deepcopy(model)
