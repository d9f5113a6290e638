"""Verification: prove on the user's own batch that a handover is exact."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from segue.core import surgery
from segue.core.blending import tensors
from segue.core.measuring import gradients, set_aside
from segue.core.seam import Seam, View, Watch
from segue.core.tensor_files import fingerprint
from segue.errors import SegueWarning, VerificationError

if TYPE_CHECKING:
    from segue.core.handover import Handover

STARVED = 0.05  # a site whose gradient falls below this share of what the teacher would let pass


@dataclass(frozen=True)
class Check:
    """One thing that must be true."""

    claim: str
    passed: bool
    detail: str = ""


@dataclass
class Verification:
    """The report of `handover.verify`."""

    checks: list[Check] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    gradient_norms: dict[str, float] = field(default_factory=dict)

    def add(self, claim: str, problems: list[str]) -> None:
        self.checks.append(Check(claim, not problems, "; ".join(problems[:3])))

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        lines = [
            f"{'ok  ' if check.passed else 'FAIL'}  {check.claim}{f': {check.detail}' if check.detail else ''}"
            for check in self.checks
        ]
        return "\n".join([*lines, *(f"note  {text}" for text in self.warnings)])


def verify(handover: Handover, args: tuple[Any, ...], kwargs: dict[str, Any], optimizer: Optimizer | None) -> Verification:
    """Run every check and raise if one fails; the model, its modes, its random state and its step stay as they were."""
    report = Verification()
    model, seams = handover.model, handover.seams
    with set_aside(handover):
        call = _Call(model, args, kwargs)
        with handover.as_teacher():
            teachers_view = call()
        with handover.as_student():
            students_view = call()
            missed = [name for name, seam in seams.items() if not seam.reached]
            with handover.recording(Watch.PAIR):
                call()
                pairs = {name: seam.records for name, seam in seams.items()}
        report.add("every site is called", [] if handover.plan.unreached == "ignore" else missed)

        with surgery.in_place_of_seams(model, {s: _teacher(seams[s.name]) for s in handover.sites}):
            report.add("teacher-only equals the original model, bit for bit", _differences(call(), teachers_view))
        with surgery.in_place_of_seams(model, {s: seams[s.name].student for s in handover.sites}):
            report.add("student-only equals the finalized model, bit for bit", _differences(call(), students_view))

        wild = [name for name, kept in pairs.items() if any(_finite(t) and not _finite(s) for t, s in kept)]
        report.add("every student returns finite numbers where its teacher does", wild)
        hashes = {name: fingerprint(_teacher(seam).state_dict()) for name, seam in seams.items()}
        changed = [name for name, digest in hashes.items() if digest != seams[name].teacher_hash]
        report.add("teachers are unchanged", changed)
        _check_gradients(handover, call, report, [name for name in seams if name not in missed])
    if optimizer is not None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in handover.named_parameters() if id(p) not in held]
        report.add("the optimizer holds every trained parameter", missing)

    for text in report.warnings:
        warnings.warn(text, SegueWarning, stacklevel=3)
    if not report.passed:
        failed = [check for check in report.checks if not check.passed]
        raise VerificationError(
            f"the handover was to be verified at {len(seams)} sites.",
            f"{len(failed)} of {len(report.checks)} checks failed.\n{report}",
            "mend what FAIL names; handover.cancel_() brings the original model back.",
        )
    return report


class _Call:
    """The user's batch, run with the same random numbers every time."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs

    def __call__(self, gradients: bool = False) -> list[Tensor]:
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(gradients):
            torch.manual_seed(0)
            torch.clear_autocast_cache()  # weights that were cast without a gradient must not be used with one
            return list(tensors(self.model(*self.args, **self.kwargs)))


def _check_gradients(handover: Handover, call: _Call, report: Verification, sites: list[str]) -> None:
    """Take gradients at weight 0.5, as planned and with the gradient passing the teachers."""
    for seam in handover.seams.values():
        seam.set_weight(0.5, 0.5)
        seam.view, seam.hold, seam.closed = View.BLEND, False, False
    named = [(site, f"{site}.{name}", p) for site in sites for name, p in handover.seams[site].student.named_parameters()]
    missing, wild = [], []
    norms: list[dict[str, float]] = []
    for passes in (False, True):
        for seam in handover.seams.values():
            seam.teacher_gradient = passes or seam.teacher_gradient
        found = _gradients(call, [p for *_, p in named])
        norms.append(dict.fromkeys(sites, 0.0))
        for (site, name, _), gradient in zip(named, found, strict=True):
            if gradient is None:
                missing.append(name)
            elif not gradient.isfinite().all():
                wild.append(name)
            else:
                norms[-1][site] += gradient.float().square().sum().item()
    problems = [f"{name} received none" for name in dict.fromkeys(missing)]
    problems += [f"{name} is not finite" for name in dict.fromkeys(wild)]
    report.add("every student parameter receives a finite gradient", problems)

    planned, possible = norms
    report.gradient_norms = {site: value**0.5 for site, value in planned.items()}
    starved = [site for site in sites if planned[site] < STARVED**2 * possible[site]]
    if starved:
        share = min((planned[site] / possible[site]) ** 0.5 for site in starved)
        report.warnings.append(
            f"{len(starved)} of {len(sites)} sites ({starved[0]!r} first) receive as little as {share:.1e} of the gradient "
            "that could reach them, because it stops at later teachers: these sites contain their residual connection. "
            "Plan with teacher_gradient=True."
        )


def _gradients(call: _Call, parameters: list[nn.Parameter]) -> list[Tensor | None]:
    outputs = [x for x in call(gradients=True) if x.requires_grad and x.is_floating_point()]
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
    return gradients(call.model, outputs, parameters, directions)


def _finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _teacher(seam: Seam) -> nn.Module:
    assert seam.teacher is not None
    return seam.teacher


def _differences(expected: list[Tensor], found: list[Tensor]) -> list[str]:
    if len(expected) != len(found):
        return [f"{len(found)} output tensors instead of {len(expected)}"]
    return [f"output {i} differs" for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not _same_bits(a, b)]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(x.detach().reshape(-1).contiguous().view(torch.uint8) for x in (a, b)))
