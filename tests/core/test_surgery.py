"""Surgery: which models and sites it takes, and modules with several names."""

import pytest
import torch
from torch import nn

import segue
from segue.errors import HandoverError, PlanError, SiteError
from tests.helpers.tiny import SITES, Attention, Net, batch, constant, optimizer_for, start, train


def test_wrapped_models_are_refused():
    for wrap in (torch.compile, nn.DataParallel):
        with pytest.raises(HandoverError, match="call replace_ on the plain model first"):
            segue.replace_(wrap(Net()), segue.Plan(sites="**.attn"))
    with pytest.raises(PlanError, match=r"replace_\(model=...\) must be an nn.Module, got 'model'"):
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


class Tied(nn.Module):
    """An embedding, two projections and a head, some of them tied."""

    def __init__(self, *tied: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.inner = nn.ModuleDict({"up": nn.Linear(8, 8, bias=False), "down": nn.Linear(8, 8, bias=False)})
        self.head = nn.Linear(8, 6, bias=False)
        if "head" in tied:
            self.head.weight = self.embed.weight
        if "inner" in tied:
            self.inner.down.weight = self.inner.up.weight
        if "memory" in tied:
            self.inner.down.weight.data = self.inner.up.weight.data

    def forward(self, tokens):
        return self.head(self.inner.down(self.inner.up(self.embed(tokens)))).mean(1)


TIED = {
    "a site with the backbone": (("head",), "head", "head", "head.weight", "embed.weight"),
    "the backbone with a site": (("head",), "embed", "embed", "embed.weight", "head.weight"),
    "two sites": (("inner",), "inner.*", "inner.down", "inner.down.weight", "inner.up.weight"),
    "two parameters on one memory": (("memory",), "inner.*", "inner.down", "inner.down.weight", "inner.up.weight"),
}


@pytest.mark.parametrize("case", TIED)
def test_a_parameter_that_a_site_shares_with_another_part_is_refused(case):
    tied, sites, site, name, other = TIED[case]
    model = Tied(*tied)
    state = {name: (id(p), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)}
    with pytest.raises(SiteError) as error:
        segue.replace_(model, segue.Plan(sites=sites))
    place = name.removesuffix(".weight")
    assert str(error.value) == (
        f"site {site!r} shares the parameter {name!r} with another part of the model.\n"
        f"  It is also {other!r}. A student has parameters of its own, so the finished model would not be tied.\n"
        f"  Hint: choose one site that contains both, or untie them before: with module = model.get_submodule({place!r}), "
        "module.weight = nn.Parameter(module.weight.detach().clone()). Nothing was changed."
    )
    assert state == {name: (id(p), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)}
    module = model.get_submodule(place)
    module.weight = nn.Parameter(module.weight.detach().clone())  # what the hint says
    segue.replace_(model, segue.Plan(sites=sites)).finalize_(force=True)


def test_a_layer_of_a_span_that_has_another_name_is_refused():
    model = Net(depth=2)
    model.again = model.blocks[1]
    with pytest.raises(SiteError, match=r"site 'blocks.0' shares the parameter 'blocks.1.norm.weight'[\s\S]+also 'again.norm"):
        segue.replace_(model, segue.Plan(sites=segue.Span("blocks")))


def test_parameters_that_are_tied_inside_a_site_or_outside_all_stay_tied():
    model = Tied("head", "inner")
    handover = segue.replace_(model, segue.Plan(sites="inner", student=segue.students.Reinit()), total_steps=4)
    handover.finalize_(force=True)
    assert model.inner.up.weight is model.inner.down.weight
    assert model.head.weight is model.embed.weight


def test_a_span_is_one_layer_while_it_runs_and_fewer_layers_afterwards():
    model, x = Net(depth=5).eval(), batch()[0]
    original = model(x)
    plan = segue.Plan(sites=segue.Span("blocks", every=2, last=3), schedule=constant(0.0))
    handover = segue.replace_(model, plan, total_steps=2)
    with handover.as_teacher():
        assert torch.equal(model(x), original)
    students = [handover.seams[name].student for name in ("blocks.0", "blocks.2")]
    with handover.as_student():
        by_students = model(x)
        assert torch.equal(by_students, model.head(model.blocks[4](students[1](students[0](x))).mean(1)))
    last = model.blocks[4]
    handover.finalize_()
    assert dict(model.blocks.named_children()) == {"0": students[0], "1": students[1], "2": last}
    assert torch.equal(model(x), by_students)


class Silent(nn.Linear):
    """A module whose train() returns nothing, as timm's LeViT attention has."""

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)


@pytest.mark.parametrize("student", [segue.students.Reinit(), lambda teacher, site: Silent(4, 4)])
def test_a_module_whose_train_returns_nothing_stays(student):
    model = nn.Sequential(Silent(4, 4), nn.Linear(4, 4))
    plan = segue.methods.distillation(sites="0", student=student, train="all")
    handover = segue.replace_(model, plan, total_steps=2)
    model(torch.randn(2, 4))
    handover.finalize_(force=True)
    assert isinstance(model[0], Silent)
    assert model(torch.randn(2, 4)).shape == (2, 4)
