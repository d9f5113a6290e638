"""What the callbacks share: start a handover, return its losses, resume it, finish it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from segue.border import checked
from segue.checkpoint import changes
from segue.checkpoint.state import restore_schedule_, settings_of
from segue.core.handover import Handover, replace_
from segue.core.local_fit import Features
from segue.core.raised import Raised
from segue.core.tensor_files import fingerprint
from segue.errors import CheckpointError, HandoverError, SegueWarning
from segue.phases import KINDS
from segue.plan import Plan
from segue.training import local_step
from segue.training.distributed import Processes
from segue.training.guard import Guard, GuardedSteps, Spike

KEY = "segue"  # of our state in a framework's checkpoint


class Driver:
    """Drive one handover from the events of a framework."""

    @checked
    def __init__(
        self, plan: Plan, *, guard: Guard | None = None, finalize: bool = True, allow_changes: Sequence[str] = ()
    ) -> None:
        self.plan = plan
        self.guard = guard
        self.allow_changes = allow_changes  # settings that may differ from those of a checkpoint
        self.finalize = finalize  # leave the students alone in the model when training ends
        self.running = False
        self._handover: Handover | None = None
        self._aux: Tensor | None = None  # of the last training forward, for the log
        self._guarded: GuardedSteps | None = None
        self._watching: list[RemovableHandle] = []
        self._errors: dict[str, Tensor] | None = None  # by site, of a local fit
        self._spike: Spike | None = None  # of the step that the framework is about to take
        self._undo: list[Callable[[], Any]] = []  # how to revert what else was changed for the handover

    @property
    def handover(self) -> Handover:
        """The handover that this callback drives."""
        if self._handover is None:
            raise HandoverError(
                "the callback has no handover yet.",
                "It has not seen a model.",
                "give the callback to the trainer first: Trainer(..., callbacks=[HandoverCallback(plan)]).",
            )
        return self._handover

    @property
    def events(self) -> list[dict[str, Any]]:
        """What the guard has undone: at which step, why, at which sites, and what it went back to."""
        return [] if self._guarded is None else self._guarded.events

    @property
    def changes_loss(self) -> bool:
        """Whether the plan adds guidance or distillation to the loss, or weighs the loss of the task."""
        weighed = any(phase.task != 1.0 for phase in self.plan.phases)
        return self.plan.guidance is not None or self.plan.distill is not None or weighed

    @property
    def takes_updates(self) -> bool:
        """Whether the next step is several updates of the students, from one forward of the original model."""
        return self.running and local_step.has_updates(self.handover.phase)

    @property
    def ends_early(self) -> bool:
        """Whether nothing after the last site is needed in the forward of the next step."""
        phase = self.handover.phase if self.running else None
        return phase is not None and local_step.from_features(phase) and not local_step.needs_output(self.handover, phase)

    def start_(self, model: nn.Module) -> None:
        """Put the seams into a model."""
        if resting := [phase.name for phase in self.plan.phases if phase.tolerance > 0]:
            raise HandoverError(
                f"the phase {resting[0]!r} has a tolerance.",
                "A framework takes an optimizer step with every batch, also when all sites rest.",
                "leave tolerance out of the phase, or train by segue.fit. Nothing was changed.",
            )
        self._handover = replace_(model, self.plan)
        self.running = True

    @checked
    def optimizer(self, kind: type[Optimizer]) -> type[Optimizer]:
        """Return an optimizer class whose groups are split by kind of parameter, for phases with `Rates`.

        For Hugging Face: `Trainer(..., optimizer_cls_and_kwargs=(callback.optimizer(torch.optim.AdamW), {"lr": 1e-4}))`.
        """
        driver = self

        class ByKind(kind):  # type: ignore[misc, valid-type]
            def __init__(self, params: Iterable[Any], **settings: Any) -> None:
                super().__init__(driver._by_kind(params), **settings)

        return ByKind

    def _by_kind(self, params: Iterable[Any]) -> list[dict[str, Any]]:
        kinds = self.handover.parameter_kinds()
        kind_of = {id(parameter): kinds[name] for name, parameter in self.handover.named_parameters()}
        groups = [group if isinstance(group, dict) else {"params": [group]} for group in params]
        return [
            {**group, "params": chosen, "kind": kind}
            for group in groups
            for kind in KINDS
            if (chosen := [p for p in group["params"] if kind_of.get(id(p), "backbone") == kind])
        ]

    def aux_loss(self, mask: Tensor | None) -> Tensor:
        """Return guidance and distillation for the last forward."""
        loss = self.handover.aux_loss(mask)
        self._aux, self._errors = loss.detach(), None
        return loss

    def watch(self, optimizer: Optimizer, saved: dict[str, Any] | None) -> None:
        """Let the guard watch the steps of a framework's optimizer, from now on or as an earlier process did.

        A framework takes every step. One that must be left out is undone as soon as it is taken: the good state has all that
        it changes, and nothing sees the weights in between.
        """
        while self._watching:  # an earlier training of the same handover
            self._watching.pop().remove()
        if self.guard is None:
            return
        self._guarded = guarded = self.guard.watch(self.handover, optimizer)
        if saved is not None:
            guarded.load_state_dict(saved)

        def after(*_: Any) -> None:
            spike, self._spike = self._spike, None
            if spike is not None:
                guarded.restore(spike)

        self._watching.append(optimizer.register_step_post_hook(after))

    def note(self, loss: Tensor) -> None:
        """Show the guard the loss of a batch."""
        if self._guarded is not None:
            self._guarded.add(loss, self._errors)

    def judge(self) -> None:
        """Judge the step that the framework is about to take."""
        if self.running and self._guarded is not None:
            self._spike = self._guarded.judge()

    def refuse_unfit(self, *, accumulate: int, scaled: bool) -> None:
        """Refuse settings of a framework that leave no place for several updates in one step, or for a guard."""
        if scaled and self.guard is not None:
            raise HandoverError(
                "HandoverCallback(guard=...) does not support fp16.",
                "The framework's gradient scaler leaves steps out by itself, and would go on with the scale of a bad step.",
                "use bf16, or train by segue.fit. Nothing was changed.",
            )
        local_step.refuse_unfit(self.plan, accumulate=accumulate, sharded=False)
        if scaled and any(local_step.has_updates(phase) for phase in self.plan.phases):
            raise HandoverError(
                "several updates in one step cannot be trained in fp16.",
                "The framework scales the loss of one update.",
                "use bf16, or train by segue.fit. Nothing was changed.",
            )

    def update(self, features: Features, optimizer: Optimizer, clip: float | None, *, each: bool = False) -> Tensor:
        """Take all updates of a step but the last, and return its loss; `clip` is the largest norm, or of `each` number."""
        phase, parameters = self.handover.phase, list(self.handover.parameters())
        assert phase is not None
        processes = Processes.current(parameters[0].device)
        *others, last = local_step.parts_of(features.rows, phase.split, processes) * phase.reuse
        if others:
            optimizer.zero_grad()
        for begin, share in others:
            loss = features.loss(begin, phase.split, measured=False) * share
            loss.backward()  # type: ignore[no-untyped-call]
            local_step.average_gradients(parameters, processes.world)
            if clip:
                (nn.utils.clip_grad_value_ if each else nn.utils.clip_grad_norm_)(parameters, clip)
            optimizer.step()
            optimizer.zero_grad()
        loss = features.loss(last[0], phase.split, measured=False) * last[1]
        self._aux, self._errors = loss.detach(), {name: part * last[1] for name, part in features.parts.items()}
        return loss

    def metrics(self) -> dict[str, float | Tensor]:
        """Return what a step logs: the mean alpha, and the last auxiliary loss."""
        alphas = self.handover.alphas.values()
        mean = sum(alphas) / len(alphas)
        return {"alpha": mean} if self._aux is None else {"alpha": mean, "aux_loss": self._aux}

    def state(self) -> dict[str, Any]:
        """Return what a resume needs in addition to the weights, as plain data."""
        original = self.handover.auxiliary.original
        frozen = None if original is None else fingerprint(original.state_dict())
        return {**self.handover.describe(), "original": frozen, **self.schedule_state()}

    def schedule_state(self) -> dict[str, Any]:
        """Return the part of the state that changes: that of an adaptive schedule, and raised alphas."""
        schedule = self.handover.stateful_schedule
        raised = {name: raised.to_list() for name, raised in self.handover.raised.items()}
        return {"schedule": None if schedule is None else schedule.state_dict(), "raised": raised}

    def set_step(self, step: int, total_steps: int, saved: dict[str, Any] | None) -> dict[str, Any]:
        """Start at step 0, or resume at a later one after the framework has loaded the weights; return the state to save."""
        self.handover.total_steps = total_steps
        now = self.state()
        raised = self._load(saved, now, step) if step else {}
        self.handover.resume_at(step, raised=raised)
        return now

    def _load(self, saved: dict[str, Any] | None, now: dict[str, Any], step: int) -> dict[str, Raised]:
        if saved is None:
            raise CheckpointError(
                f"the handover cannot resume at step {step}.",
                "The checkpoint contains none: it was written without this callback.",
                "resume from a checkpoint of the same script, or start again.",
            )
        for what, found, hint in (
            ("teachers", "Its teachers have other weights.", "load the same pretrained model first."),
            ("original", "It distils from other weights.", "build the model as before: the same files, the same seed."),
        ):
            if now[what] != saved[what]:
                raise CheckpointError(f"the handover cannot resume at step {step}.", found, hint)
        settings = settings_of(now)
        changes.require_known(self.allow_changes, settings)
        changes.require_same(settings_of(saved), settings, self.allow_changes)
        restore_schedule_(self.handover, saved, saved["schedule"], [])
        return {name: Raised.from_list(data) for name, data in saved.get("raised", {}).items()}  # 0.1.0 had none

    def finish_(self) -> None:
        """Finalize the handover if no teacher has a share any more."""
        sharing = [name for name, alpha in self.handover.alphas.items() if alpha > 0]
        if sharing:
            warnings.warn(
                f"the handover stays open: at step {self.handover.steps_done} of {self.handover.total_steps} {len(sharing)} of "
                f"{len(self.handover.sites)} teachers still have a share. Resume the training, or call "
                "callback.handover.finalize_(force=True).",
                SegueWarning,
                stacklevel=2,
            )
            return
        model = self.handover.finalize_()
        self.running = False
        for undo in self._undo:
            undo()
        config: Any = getattr(model, "config", None)
        shortened = any(site.is_span for site in self.handover.sites)  # then config.json describes the model as it is now
        if hasattr(config, "to_json_string") and not shortened:  # Hugging Face: config.json keeps the record
            config.segue = model.segue
