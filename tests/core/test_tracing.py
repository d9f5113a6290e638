"""What torch's tracers make of a running handover: the right graph, or three lines."""

import copy
import warnings

import pytest
import torch

import segue
from segue.errors import HandoverError
from segue.gates import Bernoulli
from segue.schedules import Constant, Linear
from tests.helpers.tiny import SITES, Net, batch, constant, optimizer_for, same_bits, start, train

TEXT = (
    "{} cannot trace a running handover.\n"
    "  Site 'blocks.0.attn' blends two sides, and the graph would not follow its weight.\n"
    "  Hint: trace one side (with handover.as_student():) or the model after finalize_(); torch.compile and "
    "torch.export follow the weight."
)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("gate", [segue.gates.Blend(), Bernoulli()])
def test_symbolic_tracing_is_refused_while_a_teacher_has_a_share(gate, alpha, training):
    handover = start(segue.Plan(sites=SITES, schedule=constant(alpha), gate=gate))
    train(handover, optimizer_for(handover), 1)
    handover.model.train(training)
    x, _ = batch()
    if alpha == 0:
        assert same_bits(torch.fx.symbolic_trace(handover.model)(x), handover.model(x))
        return
    with pytest.raises(HandoverError) as error:
        torch.fx.symbolic_trace(handover.model)
    assert str(error.value) == TEXT.format("torch.fx.symbolic_trace")
    for view in (handover.as_student, handover.as_teacher):
        with view() as model:
            assert same_bits(torch.fx.symbolic_trace(model)(x), model(x))
    assert handover.model(x).isfinite().all()


def test_a_jit_trace_is_right_in_evaluation_and_refused_in_training():
    handover = start(segue.Plan(sites=SITES, schedule=constant(0.5)))
    x, _ = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of all that it traces
        with pytest.raises(HandoverError) as error:
            torch.jit.trace(handover.model, x)
        assert str(error.value) == TEXT.format("torch.jit.trace")
        handover.model.eval()
        assert same_bits(torch.jit.trace(handover.model, x)(x), handover.model(x))


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_handover_follows_the_weight(strict):
    handover = start(segue.Plan(sites=SITES, schedule=Linear(start=0.9)), depth=1)
    train(handover, optimizer_for(handover), 1)
    x, _ = batch()
    exported = torch.export.export(handover.model, (x,), strict=strict).module()
    expected = handover.model(x)
    assert same_bits(exported(x), expected)
    names = [name for name, p in handover.model.named_parameters() if p.requires_grad]
    inside = dict(exported.named_parameters())
    found = torch.autograd.grad(exported(x).sum(), [inside[name] for name in names])
    wanted = torch.autograd.grad(expected.sum(), [handover.model.get_parameter(name) for name in names])
    assert all(map(same_bits, found, wanted))
    handover.step()
    assert same_bits(exported(x), handover.model(x))
    assert not same_bits(handover.model(x), expected)


def test_compiled_code_is_not_taken_for_a_traced_one():
    torch._dynamo.reset()
    handover = start(segue.Plan(sites=SITES, schedule=Constant(alpha=0.5)), depth=1)
    twin = copy.deepcopy(handover).model
    compiled = torch.compile(handover.model, backend="aot_eager", fullgraph=True)
    x, _ = batch()
    torch.testing.assert_close(compiled(x), twin(x))
    compiled(x).sum().backward()
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: twin.eval()(x))(x)
    torch.testing.assert_close(traced(x), twin(x))
    assert same_bits(Net(depth=1)(x), torch.fx.symbolic_trace(Net(depth=1))(x))
