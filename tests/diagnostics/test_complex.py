"""Sites that return complex numbers are measured as the same sites with both parts in real tensors are."""

import copy

import pytest
import torch
from torch import Tensor, nn

import segue
from segue.diagnostics import curvature_bias, gate_gradient_variance, loss_path
from segue.gates import Bernoulli
from segue.losses import LogitDistillation
from tests.helpers.tiny import constant

BATCHES = list(torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(1)))


class Spectral(nn.Module):
    """A linear map of the spectrum with complex weights, which are stored and returned as complex or as two real parts."""

    def __init__(self, real: bool) -> None:
        super().__init__()
        self.real = real
        weight = torch.randn(5, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(torch.view_as_real(weight).clone() if real else weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.view_as_complex(self.weight) if self.real else self.weight
        y = torch.fft.rfft(x) @ weight
        return torch.view_as_real(y) if self.real else y


class Net(nn.Module):
    def __init__(self, real: bool, complex_output: bool = False) -> None:
        super().__init__()
        self.site = Spectral(real)
        self.complex_output = complex_output

    def forward(self, x: Tensor) -> Tensor:
        y = self.site(x)
        y = torch.view_as_complex(y.contiguous()) if self.site.real else y
        return y if self.complex_output else torch.fft.irfft(y, n=8).exp()


def turned(teacher: nn.Module, site: segue.Site) -> nn.Module:
    """Copy the teacher with another phase, which changes the imaginary part more than the real one."""
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        parts = student.weight if student.real else torch.view_as_real(student.weight)
        parts[..., 1] *= -0.5
    return student


def handed(real: bool, **settings) -> segue.Handover:
    plan = segue.Plan(sites="site", student=turned, schedule=constant(0.5), gate=Bernoulli(), train="students")
    return segue.replace_(Net(real, **settings).train(), plan, total_steps=10)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def both(measure):
    return measure(handed(real=False)), measure(handed(real=True))


def test_the_variance_of_gradients():
    found, expected = both(lambda handover: gate_gradient_variance(handover, BATCHES, loss).together.total)
    assert (found.gate, found.data) == pytest.approx((expected.gate, expected.data), rel=1e-5)


def test_the_path_and_the_curvature():
    found, expected = both(lambda handover: loss_path(handover, BATCHES, loss).sites["site"])
    assert (found.distance, found.lipschitz) == pytest.approx((expected.distance, expected.lipschitz), rel=1e-5)
    assert found.distance > 0
    found, expected = both(lambda handover: curvature_bias(handover, BATCHES, loss, points=3).sites["site"])
    assert (found.bias, found.bound) == pytest.approx((expected.bias, expected.bound), rel=1e-3)
    assert (found.curvature, found.along) == pytest.approx((expected.curvature, expected.along), rel=1e-3)


def test_verification():
    found, expected = both(lambda handover: handover.verify(BATCHES[0]))
    assert found.gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-5)


def test_a_model_whose_output_is_complex():
    model = Net(real=False, complex_output=True)
    plan = segue.methods.dcr_dfg(sites="site", student=turned, distill=LogitDistillation(logits=lambda y: y.abs()))
    assert segue.cost(model, plan, BATCHES[0], total_steps=10).flops > 0
    assert handed(real=False, complex_output=True).verify(BATCHES[0]).gradient_norms["site"] > 0


def test_a_conjugate_view_has_the_bits_of_the_conjugate():
    class Conjugated(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).conj()

    plan = segue.Plan(sites="site", student=turned, schedule=constant(0.5))
    handover = segue.replace_(Conjugated(real=False, complex_output=True).train(), plan, total_steps=10)
    handover.verify(BATCHES[0])
