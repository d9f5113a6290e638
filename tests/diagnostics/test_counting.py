"""Counted: operations as the steps of a real training cost them, bytes kept for backward, bytes alive."""

import gc
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import segue
from segue.diagnostics.counting import PeakBytes, StepCosts, flops, module_flops, saved_bytes
from segue.errors import SegueWarning
from segue.training.recipe import Recipe
from segue.training.tasks import Classification
from tests.helpers.tiny import SITES, Net
from tests.training.fit_cases import CountedBatches

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


def silently(run):
    """Count, a warning being an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return flops(run)


def test_ordinary_operators_are_counted_without_a_warning():
    assert silently(lambda: torch.ones(2, 3) @ torch.ones(3, 4)) == 2 * 2 * 3 * 4
    assert silently(lambda: torch.einsum("bij,bjk->bik", torch.ones(5, 2, 3), torch.ones(5, 3, 4))) == 5 * 2 * 2 * 3 * 4
    assert silently(lambda: nn.Conv2d(3, 4, 3)(torch.ones(1, 3, 8, 8))) == 2 * 4 * 6 * 6 * 3 * 9
    assert silently(lambda: nn.LayerNorm(4)(torch.ones(2, 4)).softmax(-1).sum()) == 0
    assert silently(lambda: torch.linalg.vector_norm(torch.ones(2, 4))) == 0


@pytest.mark.parametrize("backward", [False, True])
def test_fused_attention_that_the_model_insists_on_is_counted(backward):
    q, k, v = (torch.randn(2, 3, tokens, 4, requires_grad=True) for tokens in (6, 7, 7))

    def attend():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            output = F.scaled_dot_product_attention(q, k, v)
        if backward:
            output.sum().backward()

    product = 2 * 2 * 3 * 6 * 7 * 4  # of one matrix product of attention
    assert silently(attend) == (2 + 5 * backward) * product  # a fused backward computes the scores once more


def test_attention_is_counted_as_its_matrix_products():
    q = torch.randn(2, 3, 6, 4, requires_grad=True)
    product = 2 * 2 * 3 * 6 * 6 * 4
    assert silently(lambda: F.scaled_dot_product_attention(q, q, q)) == 2 * product
    assert silently(lambda: F.scaled_dot_product_attention(q, q, q).sum().backward()) == 6 * product


def test_an_encoder_layer_in_evaluation_is_counted_module_by_module():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        found = silently(lambda: layer(x))
    linear = 2 * 6 * (8 * 24 + 8 * 8 + 2 * 8 * 16)
    assert found == linear + 2 * (2 * 2 * 2 * 3 * 3 * 4)


def transform(n: int, batch: int = 1) -> float:
    """Return the operations of complex transforms of one length."""
    return batch * 5 * n * math.log2(n)


@pytest.mark.parametrize(
    ("run", "count"),
    [
        (lambda x: torch.fft.fft(x), transform(16, batch=3 * 8)),
        (lambda x: torch.fft.ifft(x), transform(16, batch=3 * 8)),
        (lambda x: torch.fft.fft2(x), transform(8 * 16, batch=3)),
        (lambda x: torch.fft.fft(x, dim=0), transform(3, batch=8 * 16)),  # not a power of two
        (lambda x: torch.fft.fft(x, n=32), transform(32, batch=3 * 8)),  # zeros appended
        (lambda x: torch.fft.fft(x.real), transform(16, batch=3 * 8) / 2),
        (lambda x: torch.fft.rfft(x.real), transform(16, batch=3 * 8) / 2),
        (lambda x: torch.fft.rfft2(x.real), transform(8 * 16, batch=3) / 2),
        (lambda x: torch.fft.irfft(x, n=30), transform(30, batch=3 * 8) / 2),
        (lambda x: torch.fft.ihfft(x.real), transform(16, batch=3 * 8) / 2),
        (lambda x: torch.fft.fft(x[..., :1]), 0),
        (lambda x: torch.fft.fftshift(x), 0),
    ],
)
def test_fourier_transforms_are_counted_by_hand(run, count):
    x = torch.randn(3, 8, 16, dtype=torch.complex64)
    assert silently(lambda: run(x)) == round(count)


def test_fourier_transforms_are_counted_in_the_backward_pass_too():
    z = torch.randn(3, 16, dtype=torch.complex64, requires_grad=True)
    one = transform(16, batch=3)
    assert silently(lambda: torch.fft.fft(z).abs().sum().backward()) == 2 * one
    x = torch.randn(3, 16, requires_grad=True)
    assert silently(lambda: torch.fft.fft(x).real.sum().backward()) == one / 2 + one  # its gradient is a complex transform
    assert silently(lambda: torch.fft.irfft(z, n=16).sum().backward()) == one / 2 + one / 2


@pytest.mark.parametrize("across", ["head", "width"])
def test_a_student_of_fourier_transforms_costs_its_transforms(across):
    tokens, width, heads = 6, 8, 2
    attention = nn.MultiheadAttention(width, heads, batch_first=True)
    student = segue.students.Fourier(across=across)(attention, segue.sites.Site("attn"))
    x = torch.randn(3, tokens, width)
    projections = 2 * (2 * 3 * tokens * width * width)
    length = tokens * (width // heads if across == "head" else width)
    transforms = round(3 * tokens * width * 5 * math.log2(length))  # torch makes the values complex first
    assert silently(lambda: student(x, x, x, need_weights=False)) == projections + transforms


def fast_path():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    torch.backends.mha.set_fastpath_enabled(True)  # as a model may do itself
    with torch.no_grad():
        layer(torch.randn(2, 3, 8))


def recurrent():
    nn.LSTM(4, 4)(torch.randn(3, 2, 4))


def matrix_by_vector():
    torch.randn(5, 4) @ torch.randn(4)


def own_operator():
    torch.ops.segue_tests.triple(torch.ones(3))


@torch.library.custom_op("segue_tests::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (fast_path, "aten::_transformer_encoder_layer_fwd"),
        (recurrent, "aten::.*(lstm|rnn)"),
        (matrix_by_vector, "aten::mv"),
        (own_operator, "segue_tests::triple"),
        (lambda: torch.linalg.svd(torch.randn(4, 4)), "aten::_linalg_svd"),
        (lambda: torch.linalg.cholesky(torch.eye(4)), "aten::linalg_cholesky_ex"),
        (lambda: torch.cdist(torch.randn(4, 4), torch.randn(4, 4)), "aten::_cdist_forward"),
    ],
)
def test_an_operator_without_a_formula_is_never_left_out_in_silence(run, name):
    with pytest.warns(SegueWarning, match=rf"counted without those of .*{name}.*, which have no formula"):
        flops(run)


def test_counting_leaves_the_switches_of_attention_as_they_were():
    before = torch.backends.mha.get_fastpath_enabled()
    flops(lambda: None)
    assert torch.backends.mha.get_fastpath_enabled() == before
    with pytest.raises(RuntimeError, match="no"):
        flops(lambda: (_ for _ in ()).throw(RuntimeError("no")))
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_operations_are_told_apart_by_module():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 2)))
    x = torch.ones(3, 4)
    found = module_flops(lambda: (model(x), model(x)), {"first": model[0], "relu": model[1], "rest": model[2], "all": model})
    first, rest = 2 * 3 * 4 * 8, 2 * 3 * (8 * 2 + 2 * 2)
    assert found == {"first": 2 * first, "relu": 0, "rest": 2 * rest, "all": 2 * (first + rest)}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_kept_bytes_are_counted_once_for_every_storage():
    x = torch.ones(4, 5, requires_grad=True)
    assert saved_bytes(lambda: x.exp(), []) == 4 * 5 * 4  # its output
    assert saved_bytes(lambda: x * x, []) == 4 * 5 * 4  # both factors are one
    assert saved_bytes(lambda: x * x, [x]) == 0
    assert saved_bytes(lambda: x.view(20) * x[0:4].view(20), []) == 4 * 5 * 4  # two views of one storage
    assert saved_bytes(lambda: x[:1] * x[:1], []) == 4 * 5 * 4  # a view keeps its whole storage
    assert saved_bytes(lambda: x + x, []) == 0
    with torch.no_grad():
        assert saved_bytes(lambda: x.exp(), []) == 0


def test_kept_bytes_of_a_layer_by_hand():
    layer, x = nn.Linear(3, 7), torch.ones(5, 3)
    hidden = 5 * 7 * 4
    assert saved_bytes(lambda: layer(x).relu().square(), [*layer.parameters(), x]) == hidden  # what relu returned serves both
    assert saved_bytes(lambda: layer(x).sigmoid().square(), [*layer.parameters()]) == 5 * 3 * 4 + hidden
    assert saved_bytes(lambda: (layer(x), layer(x.clone())), layer.parameters()) == 2 * 5 * 3 * 4


def test_kept_bytes_on_the_meta_device():
    with torch.device("meta"):
        layer, x = nn.Linear(3, 7), torch.ones(5, 3)
        assert saved_bytes(lambda: layer(x).exp(), layer.parameters()) == 5 * (3 + 7) * 4


def peak(run, beside=()):
    with PeakBytes(beside) as memory:
        result = run()
    found = memory.peak, memory.now
    del result
    return found


def test_the_bytes_alive_are_followed_by_hand():
    x = torch.ones(100)
    unit = 400
    assert peak(lambda: x + x) == (unit, unit)
    assert peak(lambda: (x + 1) + 1) == (2 * unit, unit)  # the first is freed when the second is there
    assert peak(lambda: ((x + 1) + 1) + 1) == (2 * unit, unit)
    assert peak(lambda: (x + 1, x + 2, x + 3)) == (3 * unit, 3 * unit)
    assert peak(lambda: [(x + i).sum() for i in range(5)]) == (unit + 5 * 4, 5 * 4)
    assert peak(lambda: None) == (0, 0)


def test_views_and_changes_in_place_bring_nothing_to_life():
    x = torch.ones(10, 10)
    assert peak(lambda: (x.view(100), x[2:], x.t(), x.expand(3, 10, 10), x.detach())) == (0, 0)
    assert peak(lambda: x.add_(1).mul_(2)) == (0, 0)
    assert peak(lambda: (x + 1).add_(1).view(100)[:5]) == (400, 400)
    assert peak(lambda: torch.add(x, 1, out=torch.empty(10, 10))) == (400, 400)


def test_what_was_there_before_is_not_counted():
    x, y = torch.ones(10), torch.ones(10)
    assert peak(lambda: (x.view(2, 5), y.view(2, 5)), beside=[x]) == (0, 0)


def test_autograd_keeps_alive_what_backward_needs():
    x = torch.ones(100, requires_grad=True)
    assert peak(lambda: x.exp().exp().exp()) == (3 * 400, 3 * 400)  # each output is needed
    with torch.no_grad():
        assert peak(lambda: x.exp().exp().exp()) == (2 * 400, 400)

    def step():
        x.exp().exp().sum().backward()
        x.grad = None

    highest, left = peak(step)
    assert left == 0
    assert highest >= 3 * 400  # two outputs, and a gradient


def test_bytes_alive_are_forgotten_after_the_block():
    with PeakBytes() as memory:
        kept = torch.ones(100) + 1
    assert (memory.peak, memory.now) == (800, 400)
    del kept
    gc.collect()
    assert memory.now == 0


def test_a_triangular_solution_is_counted_by_its_products_and_sums():
    matrix, right = torch.eye(5).expand(3, 5, 5), torch.ones(3, 5, 7)
    counted = flops(lambda: torch.linalg.solve_triangular(matrix, right, upper=False))
    by_hand = sum(2 * row + 1 for row in range(5))  # row i: i products, i differences, one division
    assert counted == 3 * 7 * by_hand
