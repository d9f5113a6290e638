"""The handover: the running process, and the object that drives it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from segue.core import surgery
from segue.core.auxiliary import AuxiliaryLosses
from segue.core.calibrate import Fitted, calibrate, padding_of
from segue.core.optimizer_watch import OptimizerWatch
from segue.core.seam import Seam, View, Watch
from segue.core.shortening import finished_name, shorten_
from segue.core.step_state import Moment, closed_for_good, moment, progress_at
from segue.core.verify import Verification, verify
from segue.errors import HandoverError, PlanError
from segue.losses import OnTeacherStream
from segue.plan import Plan, encode
from segue.similarity import Similarity, measure
from segue.sites import Site, select
from segue.students.initialisation import LeastSquares

CLOSING_GROUPS = 2  # compiled code sees takeovers in so many groups: with evaluation and guidance, 8 graphs are torch's limit


def replace_(model: nn.Module, plan: Plan, *, total_steps: int | None = None, example: Any = None) -> Handover:
    """Put students beside the teachers that a plan selects, and return the handover that drives them.

    >>> from torch import nn
    >>> import segue
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> segue.replace_(model, segue.Plan(sites="0"), total_steps=100)
    Handover(Sequential, 1 site, step 0 of 100, alpha 1)

    Everything is checked before the model is touched. `example` is one batch (a tensor, a tuple of arguments or a dict of
    keyword arguments) on which each student is tried first; without it, students are checked on the first forward.
    `total_steps` may be set later: `handover.total_steps = n`.
    """
    surgery.refuse_wrapped(model)
    sites = select(model, plan.sites)
    surgery.refuse_running(model)
    total = None if total_steps is None else _checked_total(total_steps)
    snapshot = surgery.Snapshot(model)
    try:
        students = surgery.build_students(model, plan, sites)
        if example is not None:
            surgery.try_students(model, sites, students, example)
        return Handover(model, plan, sites, students, total, snapshot)
    except BaseException:
        snapshot.restore(model)
        raise


class Handover:
    """Drive a replacement: `step()` once per optimizer step, `finalize_()` at the end."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        sites: list[Site],
        students: dict[str, nn.Module],
        total_steps: int | None,
        snapshot: surgery.Snapshot,
    ) -> None:
        self.model = model
        self.plan = plan
        self.sites = sites
        self.steps_done = 0
        self._total_steps = total_steps
        self._snapshot = snapshot
        self._ended: str | None = None
        self.backbone_hash: str | None = None  # taken at the first save
        self.refuses_unreached = plan.unreached == "error"
        self._compiled = False  # the model as a whole has been compiled
        self._last_input: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        now = moment(plan, sites, 0, total_steps)  # asks the user's functions before anything changes
        teachers = {site.name: surgery.teacher_at(model, site) for site in sites}
        passes = plan.teacher_gradient
        self.seams = {
            name: Seam(teacher, students[name], site, teacher_gradient=site.is_span if passes is None else passes)
            for site, (name, teacher) in zip(sites, teachers.items(), strict=True)
        }
        self.teacher_hashes = {name: seam.teacher_hash for name, seam in self.seams.items()}  # as the handover began
        self.auxiliary = AuxiliaryLosses(plan, self.seams, self._frozen_original())
        self._install()
        self._follow(now)

    def _frozen_original(self) -> nn.Module | None:
        """Copy the model where a full teacher pass needs it: a backbone that trains along is no longer the original."""
        needed = self.plan.distill is not None or isinstance(self.plan.guidance, OnTeacherStream)
        if not needed or self.plan.train == "students":
            return None
        return copy.deepcopy(self.model).eval().requires_grad_(False)

    def _install(self) -> None:
        for site in self.sites:
            seam = self.seams[site.name]
            assert seam.teacher is not None
            seam.teacher.requires_grad_(False)
            if not any(p.requires_grad for p in seam.student.parameters()):  # copied from a frozen teacher
                for parameter in seam.student.parameters():
                    parameter.requires_grad_(parameter.is_floating_point())
            seam.train(self.model.training)
            surgery.put_in_place(self.model, site, seam, seam.teacher)
        if self.plan.train == "students":
            for _, parameter in self._backbone(self.model.named_parameters()):
                parameter.requires_grad_(False)
        self._snapshot.keep_tensors(self.backbone_that_changes())
        if pinned := self._pinned_modules():
            self.model.train = surgery.PinnedModes(self.model, pinned)  # type: ignore[method-assign]
            self.model.train(self.model.training)
        students = [seam.student for seam in self.seams.values()]
        self._optimizers = OptimizerWatch(self.model, students)
        self._handles: list[RemovableHandle] = [
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self.model.register_forward_hook(self._after_forward, with_kwargs=True),
            self._optimizers.listen(),
        ]

    def _backbone(self, named: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        inside = tuple(f"{name}." for site in self.sites for name in site.names)
        return ((name, value) for name, value in named if not name.startswith(inside))

    def backbone_that_changes(self) -> dict[str, Tensor]:
        """Return what training changes outside the sites, by name; nothing while the backbone is frozen."""
        state = self.model.state_dict(keep_vars=True)
        if self.plan.train == "all":
            frozen = {name for name, p in self.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
            return {name: x for name, x in self._backbone(iter(state.items())) if name not in frozen}
        if self.plan.backbone == "train":
            buffers = {name for name, _ in self.model.named_buffers()}
            return {name: x for name, x in self._backbone(iter(state.items())) if name in buffers}
        return {}

    def original_backbone(self) -> dict[str, Tensor]:
        """Return what lay around the sites when the handover began, by name."""
        return {**dict(self._backbone(iter(self.model.state_dict().items()))), **self._snapshot.tensors}

    def _pinned_modules(self) -> list[nn.Module]:
        """Return the modules that stay in evaluation: all but the seams and what contains them."""
        if self.plan.train == "all" or self.plan.backbone == "train":
            return []
        follow = {id(module) for seam in self.seams.values() for module in seam.modules()}
        for site in self.sites:
            for name in site.names:
                parts = name.split(".")
                follow |= {id(self.model.get_submodule(".".join(parts[:cut]))) for cut in range(len(parts))}
        return [module for module in self.model.modules() if id(module) not in follow]

    @property
    def total_steps(self) -> int | None:
        """How many optimizer steps the whole run has; may be set late, and changed."""
        return self._total_steps

    @total_steps.setter
    def total_steps(self, total: int) -> None:
        self._require_running("set total_steps")
        self._follow(moment(self.plan, self.sites, self.steps_done, _checked_total(total)))
        self._total_steps = total

    @property
    def progress(self) -> float:
        """The share of the run that is done, from 0 to 1."""
        return progress_at(self.steps_done, self._total_steps)

    @property
    def alphas(self) -> dict[str, float]:
        """The teacher's share at each site."""
        return {name: site.alpha for name, site in self._moment.sites.items()}

    def step(self) -> None:
        """Move on by one optimizer step: new alphas, new weights."""
        self._require_running("call step()")
        if self._total_steps is None:
            raise HandoverError(
                "step() was called to move the handover on.",
                "It does not know how long the run is, so it has no progress.",
                "give replace_(..., total_steps=n), or set handover.total_steps = n before the first step.",
            )
        self._optimizers.refuse_foreign()
        self.auxiliary.refuse_unused()
        self._go_to(self.steps_done + 1)

    def resume_at(self, step: int) -> None:
        """Set the handover to a step of an earlier process, whose forwards have compared the two sides."""
        for seam in self.seams.values():
            seam.may_skip = step > 0
        self._go_to(step)

    def _go_to(self, step: int) -> None:
        self._follow(moment(self.plan, self.sites, step, self._total_steps))
        self.steps_done = step
        self._optimizers.forget(step)
        for seam in self.seams.values():
            seam.may_skip = seam.may_skip or True in seam.reached
        if self.plan.release:
            self._release()

    def _follow(self, now: Moment) -> None:
        """Write a moment into the seams."""
        for name, site in now.sites.items():
            if site.needs_teacher and self.seams[name].teacher is None:
                raise HandoverError(
                    f"alpha at site {name!r} was to become {site.alpha:.4g} again.",
                    "Its teacher was released from memory when alpha had reached 0 for good.",
                    "do not lengthen the run after takeover, or plan with release=False.",
                )
        for name, site in now.sites.items():
            seam = self.seams[name]
            seam.set_weight(site.weight, site.mean)
            seam.hold, seam.closed = site.hold, site.closed
        self._close_for_graphs({name for name, site in now.sites.items() if site.closed})
        self.auxiliary.follow(now, together=self._compiled)
        self._moment = now

    def _close_for_graphs(self, closed: set[str]) -> None:
        """Let compiled code leave teachers out, in few groups, because each change is a recompile."""
        seen = {name for name, seam in self.seams.items() if seam.closed_in_graph} & closed
        group = math.ceil(len(self.seams) / CLOSING_GROUPS)
        if len(closed) == len(self.seams) or len(closed) - len(seen) >= group:
            seen = closed
        for name, seam in self.seams.items():
            seam.closed_in_graph = name in seen

    def _release(self) -> None:
        assert self._total_steps is not None
        if self.plan.distill is not None and self.plan.train == "students":
            return  # the distillation needs the original model to the end
        gone: list[nn.Module] = []
        for site in self.sites:
            seam = self.seams[site.name]
            if seam.teacher is None or self._moment.sites[site.name].needs_teacher:
                continue
            if self._compiled and not (seam.closed_in_graph and seam.watch is Watch.NOTHING):
                continue  # compiled code still computes it, until its group closes
            if closed_for_good(self.plan, site, self.steps_done, self._total_steps):
                self._snapshot.forget(seam.teacher)
                gone.append(seam.teacher)
                seam.teacher, seam.closed_in_graph = None, True
        surgery.free(gone, self.model)

    def aux_loss(self, mask: Tensor | None = None) -> Tensor:
        """Return the weighted sum of guidance and distillation for the forwards since the last call.

        `mask` is 1 where a token counts and 0 where it is padding. The sum is 0 in evaluation and when the plan has neither.
        """
        parts = self.losses(mask)
        device = next(iter(self.seams.values())).student_weight.device
        return sum((part.to(device) for part in parts.values()), start=torch.zeros((), device=device))

    def losses(self, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return the named parts of `aux_loss`: 'guidance/<site>' and 'distill'."""
        self._require_running("ask for the auxiliary losses")
        return self.auxiliary.losses(self.model, mask, self.as_teacher)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what trains, under the names that the finished model will have."""
        self._require_running("ask for the parameters")
        places = {f"{name}.student.": f"{name}." for site in self.sites for name in site.names}
        found = False
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:  # which teachers, and a frozen backbone, do not
                found = True
                inside = next((place for place in places if name.startswith(place)), "")
                yield finished_name(places.get(inside, "") + name.removeprefix(inside), self.sites), parameter
        if not found:
            raise HandoverError(
                "the handover was asked for the parameters to train.",
                f"There are none: its students ({type(next(iter(self.seams.values())).student).__name__}) have no parameters, "
                "and the model around them is frozen.",
                'let the model adapt: Plan(train="all").',
            )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield what trains: the students, and with train="all" what of the backbone was not frozen; never a teacher."""
        return (parameter for _, parameter in self.named_parameters())

    def units(self) -> list[nn.Module]:
        """Return every teacher and student, each to be sharded as a unit of its own before the model (FSDP2)."""
        pairs = ((seam.teacher, seam.student) for seam in self.seams.values())
        return [side for pair in pairs for side in pair if side is not None]

    @contextmanager
    def as_teacher(self) -> Iterator[nn.Module]:
        """Show the teachers alone; students are not computed."""
        self.require_teachers("as_teacher()")
        with self._viewing(View.TEACHER):
            yield self.model

    @contextmanager
    def as_student(self) -> Iterator[nn.Module]:
        """Show the students alone, as the finished model will be; teachers are not computed."""
        self._require_running("look at the students alone")
        with self._viewing(View.STUDENT):
            yield self.model

    @contextmanager
    def _viewing(self, view: View) -> Iterator[None]:
        before = [(seam, seam.view) for seam in self.seams.values()]
        for seam, _ in before:
            seam.view = view
        try:
            yield
        finally:
            for seam, earlier in before:
                seam.view = earlier

    def similarity(self, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any) -> dict[str, Similarity]:
        """Compare the two sides at every site on the same input: the students' own stream, in evaluation.

        Call it as you call the model. Without arguments it takes the last training batch.
        """
        self.require_teachers("similarity()")
        if not args and not kwargs:
            if self._last_input is None:
                raise HandoverError(
                    "similarity() was called without a batch.",
                    "The model has not seen a training batch yet (compiled forwards do not keep theirs).",
                    "call it as you call the model: handover.similarity(images).",
                )
            args, kwargs = self._last_input
        with self.comparing(padding_mask) as alike:
            self.model(*args, **kwargs)
        return alike

    @contextmanager
    def comparing(self, padding_mask: Tensor | None = None) -> Iterator[dict[str, Similarity]]:
        """Compare the two sides in the forwards of a `with` block, which show the students alone, in evaluation.

        The dictionary is filled when the block ends.
        """
        self.require_teachers("comparing()")
        alike: dict[str, Similarity] = {}
        evaluation = surgery.evaluating(self.model)
        with torch.no_grad(), self.recording(Watch.PAIR), self._viewing(View.STUDENT), evaluation:
            yield alike
            torch.clear_autocast_cache()  # weights that were cast without a gradient must not be used with one
            pairs = {name: seam.records for name, seam in self.seams.items() if seam.records}
            alike |= {name: _mean([measure(t, s, padding_mask) for t, s in records]) for name, records in pairs.items()}
        observe = getattr(self.plan.schedule, "observe", None)
        if observe is not None:
            observe(self.progress, alike)

    @contextmanager
    def recording(self, watch: Watch) -> Iterator[None]:
        """Keep outputs at the sites for a measurement, aside from what the losses keep."""
        before = [(seam, seam.watch, seam.records, seam.blind) for seam in self.seams.values()]
        for seam, *_ in before:
            seam.watch, seam.records, seam.measuring = watch, [], True
        try:
            yield
        finally:
            for seam, kept, records, blind in before:
                seam.watch, seam.records, seam.blind, seam.measuring = kept, records, blind, False

    def calibrate(
        self,
        batches: Iterable[Any],
        method: LeastSquares | None = None,
        *,
        mask: Callable[[Any], Tensor | None] = padding_of,
    ) -> dict[str, Fitted]:
        """Fit the students' output projections to their teachers on a few batches before training, in closed form.

        A batch is what the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments. `mask` finds
        its padding (1 where a token counts; by default its `attention_mask`). Returns how near each student was and is.
        """
        self.require_teachers("calibrate()")
        return calibrate(self, batches, method or LeastSquares(), mask)

    def verify(self, *args: Any, optimizer: Optimizer | None = None, **kwargs: Any) -> Verification:
        """Prove on your own batch that the handover is exact; returns a readable report, raises if something fails."""
        self.require_teachers("verify()")
        return verify(self, args, kwargs, optimizer)

    def finalize_(self, *, force: bool = False) -> nn.Module:
        """Put the students in place of the seams: a plain model again, with the original names.

        Refused while a teacher still has a share, unless forced. The plan travels along as `model.segue`, plain data.
        """
        self._require_running("finish the handover")
        sharing = {name: alpha for name, alpha in self.alphas.items() if alpha > 0}
        if sharing and not force:
            name, alpha = next(iter(sharing.items()))
            raise HandoverError(
                "finalize_() was called to leave the students alone.",
                f"{len(sharing)} of {len(self.sites)} teachers still have a share, {name!r} one of {alpha:.3g}.",
                "train until the schedule reaches 0, or say finalize_(force=True). Nothing was changed.",
            )
        students = {site: surgery.finished(self.seams[site.name].student) for site in self.sites}
        for site, student in students.items():
            for name in site.names:
                surgery.put(self.model, name, student)
        self._leave("finalized")
        shorten_(self.model, self.sites)
        earlier = getattr(self.model, "segue", None)
        self.model.segue = {**self.describe(), "earlier": earlier}  # type: ignore[assignment]
        return self.model

    def cancel_(self) -> nn.Module:
        """Bring the original model back, bit for bit."""
        self.require_teachers("cancel_()")
        for site in self.sites:
            teacher = self.seams[site.name].teacher
            assert teacher is not None
            surgery.put_back(self.model, site, teacher)
        self._leave("cancelled")
        self._snapshot.restore_tensors(self.model)
        return self.model

    def describe(self) -> dict[str, Any]:
        """Return the plan with its sites by name, the teachers' hashes and the step, as plain data."""
        return {
            "plan": {**self.plan.to_dict(), "sites": [encode(site.pattern) for site in self.sites]},
            "teachers": dict(self.teacher_hashes),
            "step": self.steps_done,
            "total_steps": self._total_steps,
        }

    def _leave(self, how: str) -> None:
        self.auxiliary.clear()
        for handle in self._handles:
            handle.remove()
        self.model.__dict__.pop("train", None)
        self._snapshot.restore(self.model)
        self._last_input = None
        self._ended = how

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            self._compiled = True
            return
        if model.training and not self._in_teachers_pass:
            self._last_input = args, kwargs

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.auxiliary.wants_calls and not self._in_teachers_pass and model.training and torch.is_grad_enabled():
            self.auxiliary.calls.append((args, kwargs, output))
        if torch.compiler.is_compiling() or not self.refuses_unreached:
            return
        for name, seam in self.seams.items():
            if seam.training not in seam.reached and not surgery.is_compiled(self.model, name):
                raise surgery.unreached(name)

    @property
    def _in_teachers_pass(self) -> bool:
        return next(iter(self.seams.values())).view is View.TEACHER

    def _require_running(self, what: str) -> None:
        if self._ended is not None:
            raise HandoverError(
                f"the handover was asked to {what}.",
                f"It has been {self._ended}; the model is a plain model again.",
                "start another one with segue.replace_(model, plan).",
            )

    def require_teachers(self, what: str) -> None:
        self._require_running(f"run {what}")
        gone = [name for name, seam in self.seams.items() if seam.teacher is None]
        if gone:
            raise HandoverError(
                f"{what} was called.",
                f"It needs the teachers, and {len(gone)} of {len(self.sites)} were released at takeover ({gone[0]!r} first).",
                "plan with release=False to keep them.",
            )

    def __repr__(self) -> str:
        alphas = sorted({f"{alpha:.3g}" for alpha in self.alphas.values()})
        span = alphas[0] if len(alphas) == 1 else f"{alphas[0]} to {alphas[-1]}"
        sites = f"{len(self.sites)} site{'s' * (len(self.sites) != 1)}"
        return (
            f"Handover({type(self.model).__name__}, {sites}, step {self.steps_done} of "
            f"{self._total_steps or 'an unknown total'}, alpha {span})"
        )


def _checked_total(total: int) -> int:
    if isinstance(total, bool) or not isinstance(total, int) or total < 1:
        raise PlanError(
            f"total_steps={total!r} was asked for.",
            "A run has a whole number of optimizer steps, at least one.",
            "count them: epochs * len(loader) // accumulation.",
        )
    return total


def _mean(measures: list[Similarity]) -> Similarity:
    return Similarity(*(sum(values) / len(values) for values in zip(*measures, strict=True)))
