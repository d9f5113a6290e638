"""Spans in plain code: each layer gets its own call, and a model that does more than call them in turn is refused."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import segue
from segue.errors import HandoverError, StudentError, VerificationError
from segue.schedules import Constant
from segue.students import OneLayer, Reinit

HALF = Constant(alpha=0.5)


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.kind = "even" if index % 2 == 0 else "odd"
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + scale * self.linear(x).tanh()


class Model(nn.Module):
    """Four layers, each called with a scale of its own kind, which the model asks the layer for."""

    def __init__(self, between=lambda x, i: x, order=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(i) for i in range(4))
        self.between, self.order = between, order

    def forward(self, x: Tensor) -> Tensor:
        scales = {"even": torch.tensor(1.0), "odd": torch.tensor(3.0)}
        for i in self.order or range(len(self.layers)):
            layer = self.layers[i]
            x = self.between(layer(x, scale=scales[layer.kind]), i)
        return x


def begin(model: nn.Module, example=None, **settings) -> segue.Handover:
    settings = {"student": OneLayer(), "schedule": HALF, **settings}
    return segue.replace_(model, segue.Plan(sites=segue.Span("layers"), **settings), total_steps=4, example=example)


def batch() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def test_every_layer_is_called_as_the_model_calls_it_and_the_student_as_the_first():
    model, x = Model(), batch()
    original = model(x)
    handover = begin(model)
    with handover.as_teacher():
        assert torch.equal(model(x), original)
    student = handover.seams["layers.0"].student, handover.seams["layers.2"].student
    with handover.as_student():
        alone = student[1](student[0](x, torch.tensor(1.0)), torch.tensor(1.0))
        assert torch.equal(model(x), alone)
    first = [handover.seams[name].teacher.layers for name in handover.seams]
    middle = first[0][1](first[0][0](x, torch.tensor(1.0)), torch.tensor(3.0))
    middle = torch.lerp(middle, student[0](x, torch.tensor(1.0)), 0.5)
    last = first[1][1](first[1][0](middle, torch.tensor(1.0)), torch.tensor(3.0))
    assert torch.equal(model(x), torch.lerp(last, student[1](middle, torch.tensor(1.0)), 0.5))
    handover.verify(x)
    handover.finalize_(force=True)
    assert torch.equal(model(x), alone)


def test_verification_sees_a_teacher_that_is_not_the_model():
    model = Model()
    handover = begin(model)
    seam = handover.seams["layers.0"]
    seam.call_layer = lambda place, mode, args, kwargs: seam.teacher.layers[0](*args, **kwargs)  # as if one were called for all
    with pytest.raises(VerificationError, match="teacher-only equals the original model, bit for bit: output 0"):
        handover.verify(batch())


def changed(x, i):
    return x + 1 if i == 2 else x


def changed_in_place(x, i):
    return x.detach().clone() if i % 2 else x.add_(1.0) if i == 2 else x


@pytest.mark.parametrize("between", [changed, changed_in_place])
def test_a_hidden_state_that_changes_between_layers_is_refused(between):
    model = Model(between)
    with pytest.raises(HandoverError, match="changes what 'layers.2' returns before it calls 'layers.3' with it"):
        begin(model, example=batch())
    handover = begin(model)
    with pytest.raises(HandoverError, match="the layers of the span at 'layers.2' do not follow one another"), torch.no_grad():
        model(batch())
    with handover.as_student(), pytest.raises(HandoverError, match="do not follow"), torch.no_grad():
        model(batch())
    with handover.as_teacher(), torch.no_grad():
        model(batch())  # as ever


def test_a_copy_of_the_hidden_state_is_welcome():
    begin(Model(lambda x, i: x.clone()), example=batch()).verify(batch())


def test_a_model_that_counts_its_layers_itself_is_refused():
    model = Model(order=[0, 1, 2, 3])
    with pytest.raises(StudentError, match="the shorter Model cannot be called with the example.\n  It raises IndexError"):
        begin(model, example=batch())
    with pytest.raises(VerificationError, match="student-only equals the finalized model, bit for bit: it raises IndexError"):
        begin(model).verify(batch())


def test_a_model_that_does_something_after_a_layer_by_its_number_is_not_verified():
    handover = begin(Model(lambda x, i: x + 1 if i == 1 else x))
    with pytest.raises(VerificationError, match="student-only equals the finalized model, bit for bit: output 0 differs"):
        handover.verify(batch())


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ([1, 2, 3], "It does not call the first one and then 'layers.1'."),
        ([0, 2, 3], "It calls 'layers.0' and not the next."),
        ([0, 1, 3], "It does not call the first one and then 'layers.3'."),
        ([0, 1, 2], "It calls 'layers.2' and not the next."),
        ([1, 0, 2, 3], "It does not call the first one and then 'layers.1'."),
    ],
)
def test_layers_that_are_skipped_or_come_in_another_order_are_refused(order, says):
    model = Model(order=order)
    begin(model)
    with pytest.raises(HandoverError, match=f"one after another.\n  {says}"):
        model(batch())


def test_layers_that_run_several_times_in_a_forward():
    class Twice(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    begin(Twice(), example=batch()).verify(batch())


@pytest.mark.parametrize("teacher_gradient", [True, False])
@pytest.mark.parametrize("every", [1, 3])  # with 3, a segment begins in the middle of a span
@pytest.mark.parametrize("says_hooks", [True, False])  # torch 2.6 does not
def test_activation_checkpointing_gives_the_same_gradients(says_hooks, every, teacher_gradient, monkeypatch):
    if not says_hooks:
        monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks", raising=False)

    class Checkpointed(Model):
        def forward(self, x: Tensor) -> Tensor:
            for start in range(0, 4, every):

                def segment(x: Tensor, start: int = start) -> Tensor:
                    for layer in self.layers[start : start + every]:
                        x = layer(x, scale=torch.tensor(1.0 if layer.kind == "even" else 3.0))
                    return x

                x = checkpoint(segment, x, use_reentrant=False) if self.training else segment(x)
            return x

    gradients = []
    for model in (Model(), Checkpointed()):
        handover = begin(model.train(), teacher_gradient=teacher_gradient)
        (model(batch()).square().sum() + model(batch()[:2] + 1).square().sum()).backward()  # two forwards for one backward
        gradients.append([parameter.grad for parameter in handover.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_reentrant_checkpointing_is_refused():
    class Checkpointed(Model):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, torch.tensor(1.0), use_reentrant=True)
            return x

    begin(model := Checkpointed().train())
    with pytest.raises(HandoverError, match=r"cannot repeat layer 'layers.3' of a span[\s\S]+use_reentrant=False"):
        model(batch().requires_grad_()).sum().backward()


class Streams(nn.Module):
    """A layer with two streams, as in SD3; the last one returns one of them alone."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(4, 4), None if last else nn.Linear(4, 4), last

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor | None, Tensor]:
        return None if self.last else text + self.b(image).mean(1, keepdim=True), image + self.a(text).mean(1, keepdim=True)


class TwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Streams(i == 3) for i in range(4))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        for layer in self.layers:
            text, image = layer(image=image, text=text)
        return image


def test_two_streams_are_blended_both():
    model, x = TwoStreams(), (torch.randn(2, 5, 4), torch.randn(2, 3, 4))
    original = model(*x)
    handover = begin(model, example=x, student=OneLayer(which=-1))
    handover.verify(*x)
    with handover.as_teacher():
        assert torch.equal(model(*x), original)
    handover.finalize_(force=True)
    assert [layer.last for layer in model.layers] == [False, True]


class Asking(Model):
    """A model that calls a part of its first layer itself, as DiT's does in diffusers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.layers[0].linear(x)


def test_a_part_that_the_model_calls_itself_is_blended_too():
    model, x = Asking(), batch()
    original = model(x)
    handover = begin(model, student=Reinit())
    with handover.as_teacher():
        assert torch.equal(model(x), original)
    seam = handover.seams["layers.0"]
    handover.verify(x)
    part = torch.lerp(seam.teacher.layers[0].linear(x), seam.student.linear(x), 0.5)
    assert torch.equal(model(x), Model.forward(model, x) + part)
    with pytest.raises(HandoverError, match="uses the weights 'layers.1.linear' inside it"):
        model.layers[1].linear(x)


def test_a_twin_follows_its_own_layers():
    model = Model()
    handover = begin(model)
    twin = copy.deepcopy(handover)
    with torch.no_grad():
        for parameter in handover.model.parameters():
            parameter.zero_()
    assert not torch.equal(twin.model(batch()), model(batch()))
    assert twin.model.layers[1].seam is twin.seams["layers.0"]


def test_units_of_a_span_are_its_layers():
    handover = begin(Model())
    assert [type(unit) for unit in handover.units()] == [Layer] * 6


@pytest.mark.slow
def test_compiled_as_one_graph():
    torch._dynamo.reset()
    model, x = Model(), batch()
    handover = begin(model.train())
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), expected)
    with handover.as_teacher():
        expected = model(x)
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), expected)
    handover.cancel_()
    begin(model := Model(changed).train())
    with pytest.raises(Exception, match="do not follow one another"):
        torch.compile(model, fullgraph=True, backend="eager")(x)


class Numbered(nn.Module):
    """Give each layer something by its number, as a timm ViT with one rotation for each layer does."""

    def __init__(self, scales: list[float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ScaledBlock() for _ in scales)
        self.register_buffer("scales", torch.tensor(scales))

    def forward(self, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=False):
            x = layer(x, scale)
        return x


class ScaledBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.linear(x * scale)


@pytest.mark.parametrize("scales", [[1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0]], ids=["equal", "different"])
def test_a_model_that_gives_its_layers_something_by_their_number_is_not_shortened(scales: list[float]) -> None:
    model = Numbered(scales)
    plan = segue.Plan(sites=segue.Span("layers", every=2), student=segue.students.OneLayer(), teacher_gradient=True)
    handover = segue.replace_(model, plan, total_steps=2)
    model.train()
    x = torch.randn(2, 4)
    model(x)
    if scales[0] == scales[-1]:
        with handover.as_student():
            expected = model(x)
        assert torch.equal(handover.finalize_(force=True)(x), expected)
        return
    with pytest.raises(VerificationError, match="the model with fewer layers is not the model that was trained"):
        handover.finalize_(force=True)
    assert len(handover.cancel_().layers) == 4
