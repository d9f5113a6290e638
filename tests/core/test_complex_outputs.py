"""Sites that return complex numbers: both parts are blended, compared and learned from."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import segue
from segue.gates import Bernoulli
from segue.losses import CkaGuidance, CosineGuidance, FeatureGuidance, GramGuidance
from tests.helpers.tiny import constant

GUIDANCES = [FeatureGuidance(), FeatureGuidance(scale="paper"), CosineGuidance(), GramGuidance(), CkaGuidance()]


class Spectral(nn.Module):
    """A linear map of the spectrum, with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x) @ self.weight


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.site = Spectral()

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(self.site(x), n=8)


class Conjugate(nn.Module):
    """Return the conjugate of what the teacher returns."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.inner = copy.deepcopy(teacher)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).conj()


def handed(alpha: float = 0.5, student=lambda teacher, site: Conjugate(teacher), **settings) -> segue.Handover:
    torch.manual_seed(0)
    plan = segue.Plan(sites="site", student=student, schedule=constant(alpha), **settings)
    return segue.replace_(Net().train(), plan, total_steps=10)


def test_a_student_that_returns_the_conjugate_is_not_alike():
    handover = handed(guidance=FeatureGuidance(scale="paper", schedule=constant(1.0)))
    x = torch.randn(4, 6, 8)
    found = handover.similarity(x)["site"]
    z = handover.seams["site"].teacher(x)
    assert found.cosine == pytest.approx(((z.real**2 - z.imag**2).sum(-1) / z.abs().square().sum(-1)).mean().item(), abs=1e-5)
    assert found.relative_error > 0.5
    handover.model(x)
    torch.testing.assert_close(handover.aux_loss(), (4 * z.imag.square()).sum(-1).mean())


def test_both_parts_are_blended_and_weights_learn():
    handover = handed(guidance=FeatureGuidance(schedule=constant(1.0)))
    x = torch.randn(4, 6, 8)
    z = handover.seams["site"].teacher(x)
    blended = handover.model(x)
    torch.testing.assert_close(blended, torch.fft.irfft(z.real.to(z.dtype), n=8))
    (blended.square().mean() + handover.aux_loss()).backward()
    gradient = handover.seams["site"].student.inner.weight.grad
    assert gradient.isfinite().all()
    assert gradient.imag.abs().max() > 0


def test_a_coin_that_skips_a_student_leaves_it_a_zero_gradient():
    handover = handed(alpha=1 - 1e-12, gate=Bernoulli(), student=lambda teacher, site: copy.deepcopy(teacher))
    for _ in range(2):  # the first forward compares the two sides
        handover.model(torch.randn(4, 6, 8)).square().mean().backward()
        handover.step()
    assert handover.seams["site"].student.weight.grad.abs().max() == 0


def test_complex_weights_copied_from_a_frozen_teacher_learn():
    plan = segue.Plan(sites="site", student=lambda teacher, site: copy.deepcopy(teacher))
    handover = segue.replace_(Net().requires_grad_(False).train(), plan, total_steps=10)
    assert [parameter.dtype for parameter in handover.parameters()] == [torch.complex64]


@pytest.mark.parametrize("guidance", GUIDANCES, ids=repr)
def test_gradients_of_complex_guidance_are_those_of_finite_differences(guidance):
    torch.manual_seed(0)
    teacher, student = torch.randn(2, 2, 4, 3, dtype=torch.complex128)
    student.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: guidance(teacher, s, None), (student,))
    with torch.no_grad():
        turned = guidance(teacher, student * complex(math.cos(0.3), math.sin(0.3)), None)
    phase_free = isinstance(guidance, GramGuidance | CkaGuidance)  # second moments do not see a common phase
    assert (abs(turned.item() - guidance(teacher, student, None).item()) < 1e-12) == phase_free
