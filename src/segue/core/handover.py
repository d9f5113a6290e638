"""The handover: the running process, and the object that drives it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from segue.border import NotNegative, PositiveInt, Unit, checked
from segue.core import events, showing, surgery, views
from segue.core.auxiliary import AuxiliaryLosses, frozen_original
from segue.core.backbone import Backbone
from segue.core.blending import blendable, padding_mask
from segue.core.building import build_students, try_students
from segue.core.calibrate import Fitted, calibrate
from segue.core.closed_form import start_far, start_gates
from segue.core.closed_loop import ClosedLoop, refuse_without_signal
from segue.core.copying import Copied
from segue.core.ending import cancel_, finalize_, release_teachers
from segue.core.kinds import copied_parameters
from segue.core.local_fit import Features, LocalFit, recording
from segue.core.modes import View, Watch
from segue.core.raised import Raised, raised_at
from segue.core.shortening import unrebuilt, warn_of
from segue.core.step_rates import StepRates
from segue.core.step_state import StepState, checked_total, closed_in_graphs, progress_at, step_state
from segue.core.student_steps import begin_step
from segue.core.trained import summary, trained_parameters
from segue.core.transaction import all_or_nothing
from segue.core.verify import OptimizerWatch, Verification, verify
from segue.display import Shown, Table
from segue.errors import HandoverError
from segue.phases import Kind, Phase, at, grouped_by_kind, schedules_of
from segue.plan import Plan, encode
from segue.schedules import Schedule, is_adaptive, refuse_unmatched
from segue.similarity import Similarities
from segue.sites import select
from segue.students.calibration import Calibration
from segue.students.closed_form import ClosedForm, FarFactor
from segue.students.layers import layers_of
from segue.students.least_squares import LeastSquares


@checked
def replace_(model: nn.Module, plan: Plan, *, total_steps: PositiveInt | None = None, example: Any = None) -> Handover:
    """Put a student next to every teacher that a plan selects, and return the handover that drives them.

    >>> from torch import nn
    >>> import segue
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> handover = segue.replace_(model, segue.Plan(sites="0"), total_steps=100)
    >>> handover.alphas
    {'0': 1.0}

    Everything is checked before the model is changed.

    Args:
        model: The pretrained model, changed in place.
        plan: What is replaced, by what, and how.
        total_steps: The number of optimizer steps of the run; may be set later: `handover.total_steps = n`.
        example: One batch (a tensor, a tuple of arguments or a dict of keyword arguments) on which each student is tried first;
            without it, students are checked on the first forward.
    """
    surgery.refuse_wrapped(model)
    sites = select(model, plan.sites)
    for schedule in schedules_of(plan):
        refuse_unmatched(schedule, sites)
    refuse_without_signal(plan)
    surgery.refuse_running(model)
    surgery.refuse_tied(model, sites)
    total = None if total_steps is None else checked_total(total_steps)
    with all_or_nothing(model):
        backbone = Backbone(model, plan, sites)
        students = build_students(model, plan, sites)
        differences = unrebuilt(model, sites, students)
        warn_of(model, differences)
        if example is not None:
            try_students(model, sites, students, example)
        handover = Handover(backbone, students, total)
        handover.unrebuilt = differences
        return handover


class Handover(Copied, Shown):
    """Drive a replacement: `step()` once per optimizer step, `finalize_()` at the end."""

    def __init__(self, backbone: Backbone, students: dict[str, nn.Module], total_steps: int | None) -> None:
        self.backbone = backbone
        self.model, self.plan, self.sites = model, plan, sites = backbone.model, backbone.plan, backbone.sites
        self.steps_done = 0
        self._total_steps = total_steps
        self.raised: dict[str, Raised] = {}  # by site: see raise_alpha
        self._ended: str | None = None
        self.backbone_hash: str | None = None  # taken at the first save
        self.on_release: Callable[[str, nn.Module], None] | None = None  # called with a teacher that is about to be released
        self.refuses_unreached = plan.unreached == "error"
        self.unrebuilt: list[str] = []  # what the configuration of the shorter model cannot describe
        self.one_thread = views.OneThread()
        self.is_compiled = False  # the root model has been compiled, not only parts of it
        self.compared: tuple[int, Similarities] | None = None  # the step of the last similarity, and what it was
        self.last_input: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.closed_loop = ClosedLoop(plan, sites)  # of an adaptive schedule
        state = self._state_at(0, total_steps)  # asks the user's functions before anything changes
        self.seams = {site.name: surgery.seam_at(model, site, students[site.name]) for site in sites}
        for seam in self.seams.values():
            seam.teacher_gradient = seam.site.is_span if plan.teacher_gradient is None else plan.teacher_gradient
        self.teacher_hashes = {name: seam.teacher_hash for name, seam in self.seams.items()}  # as the handover began
        self.copied = {name: copied_parameters(seam.student, seam.require_teacher()) for name, seam in self.seams.items()}
        self.local = LocalFit()
        self.rates = StepRates()
        self.auxiliary = AuxiliaryLosses(plan, self.seams, frozen_original(model, plan))
        self.auxiliary.measured = self.closed_loop.due(0, total_steps)
        self._install()
        self.follow(state)
        self._begin_step()
        events.begun(self)
        self._optimizers.listen()  # last: nothing after it can fail

    def _install(self) -> None:
        for site in self.sites:
            seam = self.seams[site.name]
            seam.require_teacher().requires_grad_(False)
            if not any(p.requires_grad for p in seam.student.parameters()):  # copied from a frozen teacher
                for parameter in seam.student.parameters():
                    parameter.requires_grad_(blendable(parameter))
            seam.train(self.model.training)
            surgery.put_in_place(self.model, seam)
        self.backbone.freeze()
        self._optimizers = OptimizerWatch(self.model, [seam.student for seam in self.seams.values()])
        self._handles: list[RemovableHandle] = [
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self.model.register_forward_hook(self._after_forward, with_kwargs=True),
        ]

    def backbone_that_changes(self) -> dict[str, Tensor]:
        """Return what training changes outside the sites, by name; nothing while the backbone is frozen."""
        return self.backbone.changing()

    def original_backbone(self) -> dict[str, Tensor]:
        """Return the model around the sites as it was when the handover began, by name."""
        return self.backbone.original()

    @property
    def total_steps(self) -> int | None:
        """The number of optimizer steps of the run; may be set late, and changed."""
        return self._total_steps

    @total_steps.setter
    def total_steps(self, total: int) -> None:
        self.require_running("total_steps")
        total = checked_total(total)
        self.follow(self._state_at(self.steps_done, total))
        self._total_steps = total
        self._begin_step()
        self.auxiliary.measured = self.closed_loop.due(self.steps_done, total)

    @property
    def progress(self) -> float:
        """The fraction of the run that is done, from 0 to 1."""
        return progress_at(self.steps_done, self._total_steps)

    @property
    def is_running(self) -> bool:
        """Whether it is neither finalized nor cancelled."""
        return self._ended is None

    @property
    def phase(self) -> Phase | None:
        """The phase of the run, where the plan has phases."""
        return at(self.plan.phases, self.progress)[0] if self.plan.phases else None

    @property
    def stateful_schedule(self) -> Any:
        """What has `state_dict` and `load_state_dict` of the schedule: the closed loop, a user's own schedule, or None."""
        if self.closed_loop.sites:
            return self.closed_loop
        return self.plan.schedule if hasattr(self.plan.schedule, "state_dict") else None

    @property
    def alphas(self) -> dict[str, float]:
        """The teacher's share at each site."""
        return {name: site.alpha for name, site in self.state.sites.items()}

    @property
    def weights(self) -> dict[str, float]:
        """The student's share at each site in this step, as its gate has drawn it."""
        return {name: site.weight for name, site in self.state.sites.items()}

    def step(self) -> None:
        """Move on by one optimizer step: new alphas, new weights."""
        self.require_running("step()")
        self._require_length("step()")
        self._optimizers.refuse_foreign()
        self.auxiliary.refuse_unused()
        events.warn_past_the_end(self)
        before, phase = self.state, self.phase
        self._go_to(self.steps_done + 1)
        events.arrived(self, before, self.state, phase)

    @checked
    def raise_alpha(self, alphas: Mapping[str, Unit], *, over: PositiveInt) -> None:
        """Raise alpha at some sites to at least these values; it falls back to what the schedule says.

        It is back after half of the steps that are left at the latest, so that alpha reaches 0 in time.

        Args:
            alphas: By name of the site.
            over: Steps until the schedule decides alone again.
        """
        self.require_running("raise_alpha()")
        steps_left = self._require_length("raise_alpha()") - self.steps_done
        raised = self.raised | raised_at(self.steps_done, alphas, self.raised, min(over, steps_left // 2), list(self.seams))
        self.follow(self._state_at(self.steps_done, self._total_steps, raised))
        self.raised = raised

    @checked
    def reschedule(self, schedule: Schedule) -> None:
        """Follow another schedule from this step on: it becomes that of the plan, which checkpoints hold.

        Args:
            schedule: (progress, site) -> alpha, of the whole run.
        """
        self.require_running("reschedule()")
        if self.plan.phases or self.closed_loop.sites or is_adaptive(schedule):
            raise HandoverError(
                "reschedule() needs schedules that measure nothing, and no phases.",
                f"The plan has {'phases' if self.plan.phases else 'an adaptive schedule, or the new one is adaptive'}.",
                "give the complete course in the plan. Nothing was changed.",
            )
        refuse_unmatched(schedule, self.sites)
        plan = dataclasses.replace(self.plan, schedule=schedule)
        state = step_state(plan, self.sites, self.steps_done, self._total_steps, self.closed_loop.alphas, self.raised)
        self.follow(state)
        self.plan = plan

    def resume_at(self, step: int, total_steps: int | None = None, raised: Mapping[str, Raised] | None = None) -> None:
        """Set the handover to a step of an earlier process, whose forwards have compared the two sides."""
        total = self._total_steps if total_steps is None else checked_total(total_steps)
        raised = dict(raised or {})
        self.follow(self._state_at(step, total, raised))  # refuses before it changes anything
        self._total_steps, self.raised = total, raised
        for seam in self.seams.values():
            seam.configure(compared=step > 0)
        self._arrive_at(step)

    def _go_to(self, step: int) -> None:
        readings = self.auxiliary.readings(next(iter(self.seams.values())).student_weight.device)
        loop = self.closed_loop.after(step, self._total_steps, readings)
        self.follow(step_state(self.plan, self.sites, step, self._total_steps, loop.alphas, self.raised))
        self.closed_loop = loop
        self._arrive_at(step)

    def _state_at(self, step: int, total: int | None, raised: Mapping[str, Raised] | None = None) -> StepState:
        raised = self.raised if raised is None else raised
        return step_state(self.plan, self.sites, step, total, self.closed_loop.alphas, raised)

    def _begin_step(self) -> None:
        begin_step(self.seams.values(), self.plan.seed, self.steps_done, self.progress)

    def _arrive_at(self, step: int) -> None:
        self.steps_done = step
        self._begin_step()
        self.auxiliary.measured = self.closed_loop.due(step, self._total_steps)
        if not all(site.hold for site in self.state.sites.values()):
            self.local.errors.clear()  # students that act on each other come away from their teachers
        self._optimizers.forget(step)
        for seam in self.seams.values():
            seam.configure(compared=seam.state.compared or True in seam.reached)
        if self.plan.release:
            release_teachers(self, self.state)

    def follow(self, state: StepState) -> None:
        """Write the state of a step into the seams."""
        for name, site in state.sites.items():
            if site.needs_teacher and self.seams[name].teacher is None:
                raise HandoverError(
                    f"alpha at site {name!r} must stay 0, got {site.alpha:.4g}.",
                    "Its teacher was released from memory when alpha had reached 0 for good.",
                    "do not lengthen the run after takeover, or plan with release=False.",
                )
        for name, site in state.sites.items():
            self.seams[name].configure(weight=site.weight, mean=site.mean, hold=site.hold)
        closed = {name for name, site in state.sites.items() if site.closed}
        before = {name for name, seam in self.seams.items() if seam.state.closed_in_graph}
        in_graphs = closed_in_graphs(closed, before, len(self.seams))
        for name, seam in self.seams.items():
            seam.configure(closed_in_graph=name in in_graphs)
        self.auxiliary.follow(state, together=self.is_compiled)
        self.state = state

    @checked
    def weighted(self, task_loss: Tensor) -> Tensor:
        """Return the loss of the task times the weight that the phase gives it.

        Args:
            task_loss: A scalar.
        """
        weight = 1.0 if self.phase is None else self.phase.task
        if weight == 0.0 and self.auxiliary.distill > 0:
            return task_loss.detach() * weight  # no backward: distillation reaches all parameters, which DDP waits for
        return task_loss if weight == 1.0 else task_loss * weight

    def aux_loss(self, mask: Tensor | None = None, *, output_mask: Tensor | None = None) -> Tensor:
        """Return the weighted sum of guidance and distillation over the samples of the forwards since the last call.

        >>> import torch
        >>> import segue
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> handover = segue.replace_(model, segue.methods.dcr_dfg("0"), total_steps=10)
        >>> loss = model(torch.randn(8, 4)).square().mean() + handover.aux_loss()

        The sum is 0 in evaluation and when the plan has neither.

        Args:
            mask: 1 where a token counts and 0 where it is padding.
            output_mask: The same for distillation, such as of the tokens that a chat's assistant writes; by default `mask`.
        """
        parts = self.losses(mask, output_mask=output_mask)
        device = next(iter(self.seams.values())).student_weight.device
        return sum((part.to(device) for part in parts.values()), start=torch.zeros((), device=device))

    @checked
    def losses(self, mask: Tensor | None = None, *, output_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return the named parts of `aux_loss`: 'guidance/<site>' and 'distill'.

        Args:
            mask: As in `aux_loss`.
            output_mask: As in `aux_loss`.
        """
        self.require_running("aux_loss()")
        return self.auxiliary.losses(self.model, mask, self.as_teacher, output_mask)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what trains, under the names that the finished model will have."""
        return ((name, parameter) for name, parameter, _ in self._trained())

    @checked
    def parameter_groups(self, *, weight_decay: NotNegative = 0.0) -> list[dict[str, Any]]:
        """Return what trains as groups for an optimizer, by kind ("new", "copied", "backbone"); biases and norms do not decay.

        A phase or recipe with `Rates` gives each kind its own learning rate.

        Args:
            weight_decay: Of all other parameters.
        """
        return grouped_by_kind(((parameter, kind) for _, parameter, kind in self._trained()), weight_decay)

    @checked
    def schedule_rates(self, optimizer: Optimizer) -> None:
        """Let every step of an optimizer have the learning rates and weight decay of its phase.

        Between its steps, and where a phase says nothing, the optimizer has those of its own scheduler. `segue.fit` and the
        callbacks do this themselves.

        Args:
            optimizer: Yours, made of `parameters()` or `parameter_groups()`.
        """
        if self.plan.phases:
            self.rates.schedule(self, optimizer)

    def parameter_kinds(self) -> dict[str, Kind]:
        """Return the kind of every parameter that trains, by its name in the finished model."""
        return {name: kind for name, _, kind in self._trained()}

    def _trained(self) -> Iterator[tuple[str, nn.Parameter, Kind]]:
        self.require_running("parameters()")
        return trained_parameters(self)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield what trains: the students, with train="all" also the backbone where it was not frozen; never a teacher."""
        return (parameter for _, parameter in self.named_parameters())

    def print_trainable_parameters(self) -> None:
        """Print how many parameters train, of which kinds, and how many the teachers hold beside them.

        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> replace_(model, Plan(sites="0")).print_trainable_parameters()
        trainable: 20 of 30 parameters (66.7%; new 20); teachers beside them: 20
        """
        print(summary(self))

    def units(self) -> list[nn.Module]:
        """Return every teacher (of a span, its layers) and student; with FSDP2, shard each as its own unit, then the model."""
        pairs = ((*([] if seam.teacher is None else layers_of(seam.teacher)), seam.student) for seam in self.seams.values())
        return [side for pair in pairs for side in pair]

    def as_teacher(self) -> AbstractContextManager[nn.Module]:
        """Show the teachers alone, to one thread; students are not computed."""
        self.require_teachers("as_teacher()")
        return views.viewing(self, View.TEACHER)

    def as_student(self) -> AbstractContextManager[nn.Module]:
        """Show the students alone, as in the finished model, to one thread; teachers are not computed."""
        self.require_running("as_student()")
        return views.viewing(self, View.STUDENT)

    @checked
    def similarity(self, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any) -> Similarities:
        """Compare the two sides at every site on the same input: the students' own stream, in evaluation.

        >>> import torch
        >>> import segue
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> handover = segue.replace_(model, segue.methods.dcr_dfg("0"), total_steps=10)
        >>> list(handover.similarity(torch.randn(8, 4)))
        ['0']

        Call it as you call the model. Without arguments it takes the last training batch.

        Args:
            args: The model's arguments.
            padding_mask: (batch, tokens), 1 where a token counts.
            kwargs: The model's keyword arguments.
        """
        self.require_teachers("similarity()")
        if not args and not kwargs:
            if self.last_input is None:
                raise HandoverError(
                    "similarity() needs a batch.",
                    "The model has not seen a training batch yet (compiled forwards do not keep theirs).",
                    "call it as you call the model: handover.similarity(images).",
                )
            args, kwargs = self.last_input
        with self.comparing(padding_mask) as similar:
            self.model(*args, **kwargs)
        return similar

    @checked
    def comparing(self, padding_mask: Tensor | None = None) -> AbstractContextManager[Similarities]:
        """Compare the two sides in the forwards of a `with` block, which show the students alone, in evaluation.

        The dictionary is filled when the block ends.

        Args:
            padding_mask: (batch, tokens), 1 where a token counts.
        """
        self.require_teachers("comparing()")
        return views.comparing(self, padding_mask)

    @checked
    def features(self, mask: Tensor | None = None, *, complete: bool = True) -> AbstractContextManager[Features]:
        """Record the inputs and outputs of all teachers in a `with` block, whose forwards are those of the original model.

        The students then learn from them without the model, as long as alpha is 1, in as many updates as you like:

            with handover.features() as features:
                model(images)
            for loss in features.losses(split=4, reuse=4):
                loss.backward(); optimizer.step(); optimizer.zero_grad()
            handover.step()

        Args:
            mask: (batch, tokens), 1 where a token counts.
            complete: With False the block ends when the last site has returned: the head, and a loss, are not computed.
        """
        self.require_teachers("features()")
        if not self.auxiliary.guidance:
            raise HandoverError(
                "features() needs guidance.",
                "The plan has none, or its weight is 0 at this step.",
                "give Plan(guidance=segue.losses.FeatureGuidance()).",
            )
        return recording(self, mask, self._optimizers.allow_another, complete=complete)

    def recording(self, watch: Watch) -> AbstractContextManager[None]:
        """Record outputs at the sites for a measurement, apart from those for the losses."""
        return views.recording(self.seams.values(), watch)

    @checked
    def calibrate(
        self,
        batches: Iterable[Any],
        method: Calibration | ClosedForm | FarFactor | None = None,
        *,
        mask: Callable[[Any], Tensor | None] = padding_mask,
    ) -> dict[str, Fitted]:
        """Fit the students to their teachers on a few batches before training, in closed form.

        >>> import torch
        >>> import segue
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> handover = segue.replace_(model, segue.methods.dcr_dfg("0"), total_steps=10)
        >>> list(handover.calibrate([torch.randn(64, 4)]))
        ['0']

        Returns each student's error on samples that are held out.

        Args:
            batches: What the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments each.
            method: `LeastSquares()` by default, `ClosedForm()` for gated students, `FarFactor()`, or your own.
            mask: batch -> its padding, 1 where a token counts; by default its `attention_mask`.
        """
        self.require_teachers("calibrate()")
        if isinstance(method, ClosedForm):
            return start_gates(self, batches, method, mask)
        if isinstance(method, FarFactor):
            return start_far(self, batches, method, mask)
        return calibrate(self, batches, method or LeastSquares(), mask)

    @checked
    def verify(self, *args: Any, optimizer: Optimizer | None = None, **kwargs: Any) -> Verification:
        """Prove on your own batch that the handover is exact; returns a readable report, raises if something fails.

        >>> import torch
        >>> import segue
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> handover = segue.replace_(model, segue.methods.dcr_dfg("0"), total_steps=10)
        >>> report = handover.verify(torch.randn(8, 4), optimizer=torch.optim.AdamW(handover.parameters()))

        Args:
            args: The model's arguments.
            optimizer: Yours: it must hold what trains, and nothing of a teacher.
            kwargs: The model's keyword arguments.
        """
        self.require_teachers("verify()")
        return verify(self, args, kwargs, optimizer)

    @checked
    def finalize_(self, *, force: bool = False) -> nn.Module:
        """Put the students in place of the seams: a plain model again, with the original names.

        The plan stays with the model as `model.segue`, plain data.

        Args:
            force: Also while a teacher still has a share, which is refused otherwise.
        """
        self.require_running("finalize_()")
        return finalize_(self, force=force)

    def cancel_(self) -> nn.Module:
        """Bring the original model back, bit for bit."""
        self.require_teachers("cancel_()")
        return cancel_(self)

    def describe(self) -> dict[str, Any]:
        """Return the plan with its sites by name, the teachers' hashes and the step, as plain data."""
        return {
            "plan": {**self.plan.to_dict(), "sites": [encode(site.pattern) for site in self.sites]},
            "teachers": dict(self.teacher_hashes),
            "step": self.steps_done,
            "total_steps": self._total_steps,
        }

    def end(self, how: str) -> None:
        """Take the handover's hooks out of the model, and give the backbone back what it was."""
        self._ended = how
        events.ended(self, how)
        for handle in self._handles:
            handle.remove()
        self.backbone.restore()

    def forget(self) -> None:
        """Drop what only a running handover needs."""
        self._optimizers.stop()
        self.auxiliary.clear()
        self.last_input = None

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            self.is_compiled = True
            return
        if model is self.model:  # not one of DataParallel's replicas, which take the view with them to other threads
            self.one_thread.before_forward()
        if model.training and not self._in_teachers_pass:
            self.last_input = args, kwargs

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if model is self.model and not torch.compiler.is_compiling():
            self.one_thread.after_forward()
        if self.auxiliary.wants_calls and not self._in_teachers_pass and model.training and torch.is_grad_enabled():
            self.auxiliary.calls.append((args, kwargs, output))
        if torch.compiler.is_compiling():
            return
        for seam in self.seams.values():
            seam.require_complete()
        for name, seam in self.seams.items():
            if self.refuses_unreached and seam.training not in seam.reached and not surgery.is_compiled(self.model, name):
                raise surgery.unreached(name)

    @property
    def _in_teachers_pass(self) -> bool:
        return next(iter(self.seams.values())).state.view is View.TEACHER

    def require_running(self, what: str) -> None:
        if self._ended is not None:
            raise HandoverError(
                f"{what} needs a running handover.",
                f"This one is {self._ended}; the model is a plain model again.",
                "start another one with segue.replace_(model, plan).",
            )

    def _require_length(self, what: str) -> int:
        if self._total_steps is None:
            raise HandoverError(
                f"{what} needs total_steps.",
                "The handover does not know how long the run is, so it has no progress.",
                "give replace_(..., total_steps=n), or set handover.total_steps = n before the first step.",
            )
        return self._total_steps

    def require_teachers(self, what: str) -> None:
        self.require_running(what)
        gone = [name for name, seam in self.seams.items() if seam.teacher is None]
        if gone:
            raise HandoverError(
                f"{what} needs the teachers.",
                f"{len(gone)} of {len(self.sites)} were released at takeover ({gone[0]!r} first).",
                "plan with release=False to keep them.",
            )

    def plot(self) -> Any:
        """Draw the alpha of every site over the run, and the present step; needs matplotlib.

        Returns a matplotlib figure, which a notebook shows: `handover.plot().savefig("alphas.png")` elsewhere.
        """
        return showing.plot(self)

    def __str__(self) -> str:
        return showing.line(self)

    def __repr__(self) -> str:
        return self._table().text()

    def _table(self) -> Table:
        return showing.table(self)
