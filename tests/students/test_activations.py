import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import segue
from segue.errors import HandoverError, PlanError, SegueWarning, StudentError
from segue.sites import Site
from segue.students import ActivationSwap
from segue.students.activations import ACTIVATIONS
from tests.helpers.models import bert, build, gpt2, hf_vit, images, llama, named_images, sentences, text
from tests.students.handing_over import compiled_equals_eager, through_a_handover, timm_vit

SITE = Site("here")
CASES = {
    "timm": (timm_vit, images, "blocks.*.mlp.act"),
    "HF ViT": (hf_vit, named_images, "**.activation_fn"),
    "HF BERT": (bert, sentences, "**.intermediate_act_fn"),
    "HF GPT-2": (gpt2, text, "**.mlp.act"),
    "HF Llama": (llama, text, "**.act_fn"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_family_goes_through_a_handover(case, tmp_path):
    make, batch, sites = CASES[case]
    plan = segue.Plan(sites=sites, student=ActivationSwap(to="squared_relu"), train="all", teacher_gradient=True)
    model = through_a_handover(make, batch(), plan, tmp_path)
    swapped = [model.get_submodule(site.name) for site in segue.sites.select(build(make), sites)]
    assert [type(m).__name__ for m in swapped] == ["SquaredRelu"] * 2


def test_a_running_handover_stops_and_resumes(tmp_path):
    plan = segue.Plan(sites="blocks.*.mlp.act", student=ActivationSwap(), train="all")
    batch = images()
    handover = segue.replace_(build(timm_vit), plan, total_steps=4)
    optimizer = torch.optim.SGD(handover.parameters(), lr=0.1)
    batch.loss(handover.model.train()).backward()
    optimizer.step()
    handover.step()
    segue.save(handover, tmp_path)
    again = segue.load_(build(timm_vit), tmp_path)
    assert again.steps_done == 1
    assert torch.equal(batch.predict(again.model), batch.predict(handover.model))


def test_with_a_frozen_model_there_is_nothing_to_train():
    plan = segue.Plan(sites="blocks.*.mlp.act", student=ActivationSwap())
    handover = segue.replace_(build(timm_vit), plan, total_steps=4)
    with pytest.raises(HandoverError) as error:
        torch.optim.AdamW(handover.parameters())
    assert str(error.value) == (
        "the handover has no parameters to train.\n"
        "  Its students (ReLU) have none, and the model around them is frozen.\n"
        '  Hint: let the model adapt: Plan(train="all").'
    )


def test_a_forgotten_step_is_noticed():
    plan = segue.Plan(sites="blocks.*.mlp.act", student=ActivationSwap(), train="all")
    handover = segue.replace_(build(timm_vit), plan, total_steps=20)
    optimizer = torch.optim.SGD(handover.parameters(), lr=0.0)
    with pytest.raises(HandoverError, match="Alpha stands still"):
        for _ in range(20):
            optimizer.step()


X = torch.linspace(-3, 3, 13)
FORMULAS = {
    "elu": torch.where(X > 0, X, X.exp() - 1),
    "gelu": F.gelu(X),
    "gelu_tanh": 0.5 * X * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (X + 0.044715 * X**3))),
    "hard_swish": X * (X + 3).clamp(0, 6) / 6,
    "identity": X,
    "leaky_relu": torch.where(X > 0, X, 0.01 * X),
    "mish": X * torch.tanh(torch.log1p(X.exp())),
    "relu": X.clamp_min(0),
    "relu6": X.clamp(0, 6),
    "selu": 1.0507009873554805 * torch.where(X > 0, X, 1.6732632423543772 * (X.exp() - 1)),
    "sigmoid": 1 / (1 + (-X).exp()),
    "silu": X / (1 + (-X).exp()),
    "softplus": torch.log1p(X.exp()),
    "squared_relu": X.clamp_min(0) ** 2,
    "tanh": torch.tanh(X),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_formulas(name):
    student = ActivationSwap(to=name)(nn.GELU().eval(), SITE)
    torch.testing.assert_close(student(X), FORMULAS[name])
    assert not student.training


def test_a_function_makes_any_other(tmp_path):
    factory = ActivationSwap(to=lambda: nn.PReLU(init=0.1))
    plan = segue.Plan(sites="blocks.*.mlp.act", student=factory)
    with pytest.warns(SegueWarning, match=r"the plan's student\.to .+ is your own, so only its name is saved"):
        model = through_a_handover(timm_vit, images(), plan, tmp_path, student=factory)
    assert isinstance(model.blocks[1].mlp.act, nn.PReLU)


def test_activations_are_recognised_whatever_they_hold():
    for teacher in (nn.ReLU(inplace=True), nn.PReLU(), nn.Hardtanh(), nn.Sequential(nn.GELU(), nn.Dropout(0.5)), nn.Identity()):
        assert isinstance(ActivationSwap(to="silu")(teacher, SITE), nn.SiLU)
        assert teacher.training


@pytest.mark.parametrize("teacher", [nn.Linear(4, 4), nn.Softmax(-1), nn.LayerNorm(4), nn.GLU(), nn.LSTM(4, 4), nn.Flatten(0)])
def test_other_modules_are_refused(teacher):
    with pytest.raises(StudentError) as error:
        ActivationSwap()(teacher, SITE)
    assert str(error.value) == (
        "ActivationSwap() cannot replace the module at site 'here'.\n"
        f"  It is {type(teacher).__name__}, which is not an elementwise function.\n"
        "  Hint: choose activation modules, such as 'blocks.*.mlp.act' or '**.intermediate_act_fn'. Nothing was changed."
    )


def test_an_unknown_name():
    with pytest.raises(PlanError) as error:
        ActivationSwap(to="leakyrelu")
    assert str(error.value) == (
        "ActivationSwap(to='leakyrelu') does not name an activation.\n"
        "  Nearest names: leaky_relu, relu.\n"
        "  Hint: give the name of an activation, or a function that builds a module: to=lambda: nn.Hardtanh(-2, 2)."
    )


def test_it_compiles_as_one_graph():
    compiled_equals_eager(ActivationSwap(to="squared_relu")(nn.GELU(), SITE), torch.randn(3, 6))


def test_it_saves_as_data():
    plan = segue.Plan(sites="a", student=ActivationSwap(to="tanh"), train="all")
    assert segue.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
