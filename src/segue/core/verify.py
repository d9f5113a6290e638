"""Verification: prove on the user's own batch that a handover is exact, and notice an optimizer that cannot train it."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from segue.core.blending import blendable, calling, tensors
from segue.core.modes import View, Watch
from segue.core.seam import Seam, is_sharded
from segue.core.surgery import finished_in_place, original_in_place
from segue.core.tensor_files import fingerprint, same_bits
from segue.core.views import gradients, isolated
from segue.display import Shown, Table
from segue.errors import HandoverError, SegueWarning, StudentError, VerificationError
from segue.similarity import as_real

if TYPE_CHECKING:
    from segue.core.handover import Handover

STARVED = 0.05  # a site whose gradient is below this fraction of the one with teacher_gradient=True
OF_LAYERS = ("hidden_states", "attentions")  # the ends of their names; a model with fewer layers returns fewer
PATIENCE = 8  # optimizer steps without a handover.step() before it counts as missing


@dataclass(frozen=True)
class Check:
    """One thing that must be true."""

    claim: str
    passed: bool
    detail: str = ""


@dataclass(repr=False)
class Verification(Shown):
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

    __repr__ = __str__

    def _table(self) -> Table:
        passed = sum(check.passed for check in self.checks)
        rows = [("ok" if check.passed else "FAIL", check.claim, check.detail) for check in self.checks]
        return Table(f"{passed} of {len(rows)} checks pass", ("", "claim", "detail"), rows, self.warnings)


def verify(handover: Handover, args: tuple[Any, ...], kwargs: dict[str, Any], optimizer: Optimizer | None) -> Verification:
    """Run every check and raise if one fails; the model, its modes, its random state and its step stay as they were."""
    report = Verification()
    model, seams = handover.model, handover.seams
    with isolated(handover):
        call = _Call(model, args, kwargs, OF_LAYERS if any(site.is_span for site in handover.sites) else ())
        as_called = "call it as the model: model(images) is handover.verify(images), model(**batch) handover.verify(**batch)."
        with handover.as_teacher(), calling("arguments of verify()", as_called):
            teachers_view = call()
        with handover.as_student():
            students_view = call()
            missed = [name for name, seam in seams.items() if not seam.reached]
            with handover.recording(Watch.PAIR):
                call()
                pairs = {name: seam.records for name, seam in seams.items()}
        report.add("every site is called", [] if handover.plan.unreached == "ignore" else missed)

        with original_in_place(model, seams.values()):
            report.add("teacher-only equals the original model, bit for bit", _differences(call(), teachers_view))
        with finished_in_place(model, handover.sites, {name: seam.student for name, seam in seams.items()}):
            report.add("student-only equals the finalized model, bit for bit", _finished_differences(call, students_view))

        if any(hasattr(seam.student, "prove") for seam in seams.values()):
            report.add("softmax attention with the teachers' weights equals the teachers", _misread(handover, call))
        infinite = [name for name, records in pairs.items() if any(_finite(t) and not _finite(s) for t, s in records)]
        report.add("every student returns finite numbers where its teacher does", infinite)
        hashes = {name: fingerprint(seam.require_teacher().state_dict()) for name, seam in seams.items()}
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
            f"{len(failed)} of {len(report.checks)} checks failed.",
            "; ".join(f"FAIL  {check.claim}: {check.detail}" for check in failed) + ".",
            "fix what FAIL names; handover.cancel_() brings the original model back.",
        )
    return report


def require_same_when_shortened(handover: Handover, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse to shorten a model that gives its layers something by their number: it would not be the one that was trained."""
    if not any(site.is_span for site in handover.sites) or is_sharded(handover.model):
        return
    with isolated(handover):
        call = _Call(handover.model, args, kwargs, OF_LAYERS)
        with handover.as_student():
            trained = call()
        with finished_in_place(handover.model, handover.sites, {name: s.student for name, s in handover.seams.items()}):
            problems = _finished_differences(call, trained)
    if problems:
        raise VerificationError(
            "the model with fewer layers is not the model that was trained.",
            f"On the last training batch {problems[0]}: it gives a layer something by its number, as a rotation or scale.",
            "cancel_() brings the original model back; choose the modules inside the layers as sites. Nothing was changed.",
        )


def _misread(handover: Handover, call: _Call) -> list[str]:
    """Let every student that reads its teacher's calls prove that it reads those of this batch rightly."""
    problems: list[str] = []

    def prove(seam: Seam, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            seam.prove(args, kwargs)
        except StudentError as error:
            problems.append(f"{seam.site.name}: {error.args[1]}")

    handles = [seam.register_forward_pre_hook(prove, with_kwargs=True) for seam in handover.seams.values()]
    try:
        with handover.as_teacher():
            call()
    finally:
        for handle in handles:
            handle.remove()
    return problems


class _Call:
    """The user's batch, run with the same random numbers every time."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], left_out: tuple[str, ...]) -> None:
        self.model, self.args, self.kwargs, self.left_out = model, args, kwargs, left_out

    def __call__(self, gradients: bool = False) -> list[Tensor]:
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(gradients):
            torch.manual_seed(0)
            torch.clear_autocast_cache()  # weights that were cast without a gradient must not be used with one
            output = self.model(*self.args, **self.kwargs)
            if self.left_out and isinstance(output, Mapping):
                output = {key: value for key, value in output.items() if not key.endswith(self.left_out)}
            return list(tensors(output))


def _check_gradients(handover: Handover, call: _Call, report: Verification, sites: list[str]) -> None:
    """Take gradients at weight 0.5, as planned and with the gradient passing the teachers."""
    for seam in handover.seams.values():
        seam.configure(weight=0.5, mean=0.5, view=View.BLEND, hold=False)
    named = [(site, f"{site}.{name}", p) for site in sites for name, p in handover.seams[site].student.named_parameters()]
    missing, infinite = [], []
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
                infinite.append(name)
            else:
                norms[-1][site] += as_real(gradient).float().square().sum().item()
    problems = [f"{name} received none" for name in dict.fromkeys(missing)]
    problems += [f"{name} is not finite" for name in dict.fromkeys(infinite)]
    report.add("every student parameter receives a finite gradient", problems)

    planned, possible = norms
    report.gradient_norms = {site: value**0.5 for site, value in planned.items()}
    starved = [site for site in sites if planned[site] < STARVED**2 * possible[site]]
    if starved:
        least = min((planned[site] / possible[site]) ** 0.5 for site in starved)
        report.warnings.append(
            f"{len(starved)} of {len(sites)} sites ({starved[0]!r} first) receive as little as {least:.1e} of the gradient "
            "that could reach them, because it stops at later teachers: these sites contain their residual connection. "
            "Plan with teacher_gradient=True."
        )


def _gradients(call: _Call, parameters: list[nn.Parameter]) -> list[Tensor | None]:
    outputs = [as_real(x) for x in call(gradients=True) if x.requires_grad and blendable(x)]
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
    return gradients(call.model, outputs, parameters, directions)


def _finished_differences(call: _Call, found: list[Tensor]) -> list[str]:
    try:
        return _differences(call(), found)
    except Exception as error:  # a model may refuse to run with fewer layers
        return [f"it raises {type(error).__name__}: {error}"]


def _finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _differences(expected: list[Tensor], found: list[Tensor]) -> list[str]:
    if len(expected) != len(found):
        return [f"{len(found)} output tensors instead of {len(expected)}"]
    return [f"output {i} differs" for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not same_bits(a, b)]


class OptimizerWatch:
    """Remember which optimizers stepped since the handover moved."""

    def __init__(self, model: nn.Module, students: list[nn.Module]) -> None:
        self.model = model
        self.students = students
        self.forget(0)

    def forget(self, step: int) -> None:
        """Start again: the handover has moved to a step."""
        self.step = step
        self.with_students: dict[int, int] = {}  # how often each
        self.without_students = False  # one that holds other parameters of this model

    def listen(self) -> None:
        """Listen to every optimizer step in the process, until `stop` or as long as this object lives."""
        with _lock:
            if not _hook:
                _hook.append(register_optimizer_step_post_hook(_tell))
            _listening.add(self)

    def stop(self) -> None:
        """Listen no more."""
        with _lock:
            _listening.discard(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "students": self.students, "step": self.step, "listens": self in _listening}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"], state["students"])  # type: ignore[misc]
        self.forget(state["step"])
        if state["listens"]:  # the twin of a running handover watches optimizers of its own
            self.listen()

    def stepped(self, optimizer: Optimizer) -> None:
        """Note what an optimizer holds, and refuse to go without `handover.step()`."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = [p for student in self.students for p in student.parameters()]
        trained = trained or list(self.model.parameters())  # students without parameters: the model around them adapts
        if not any(id(p) in held for p in trained):
            self.without_students |= any(id(p) in held for p in self.model.parameters())
            return
        times = self.with_students[id(optimizer)] = self.with_students.get(id(optimizer), 0) + 1
        if times > PATIENCE:
            raise HandoverError(
                f"the optimizer has stepped {times} times without a handover.step().",
                f"Alpha stands still: the handover is at step {self.step}.",
                "call handover.step() after every optimizer.step().",
            )

    def allow_another(self) -> None:
        """Let each optimizer step once more before the handover moves: a batch may be for several updates."""
        self.with_students = {optimizer: times - 1 for optimizer, times in self.with_students.items()}

    def refuse_foreign(self) -> None:
        """Refuse an optimizer that trains the model without its students."""
        if self.without_students and not self.with_students:
            raise HandoverError(
                "the optimizer does not hold the students.",
                "It holds other parameters of this model: it was built before replace_.",
                "build it after replace_: torch.optim.AdamW(handover.parameters(), ...).",
            )


# One hook for all: adding or removing hooks of torch's while it walks through them, as a garbage collection would, is an error.
_hook: list[RemovableHandle] = []
_listening: weakref.WeakSet[OptimizerWatch] = weakref.WeakSet()
_lock = threading.RLock()


def _tell(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    with _lock:  # another thread may begin or end a handover
        watches = list(_listening)
    for watch in watches:
        watch.stepped(optimizer)
