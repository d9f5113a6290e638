"""The guard: after a spike or a step without a finite update, go back to the last good state and go on more slowly."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from segue.border import Fraction, PositiveFloat, PositiveInt, Unit, checked
from segue.core.handover import Handover
from segue.core.tensor_files import full
from segue.errors import HandoverError, TrainingError
from segue.phases import alpha_of
from segue.training.distributed import Processes
from segue.training.ema import RunningEma
from segue.training.good_state import GoodState
from segue.training.spikes import Series, numbers

LOGGER = logging.getLogger(__name__)
JUMP = 0.1  # a fall of alpha in one step after which the loss is expected to be another one
RESPONSIBLE = 0.5  # of the largest growth
LONGEST = 10**12  # step
ADVICE = "resume from your last checkpoint"  # outside of fit


@checked
@dataclass(frozen=True, kw_only=True)
class Guard:
    """Watch a training, and bring it back when it goes wrong.

    A loss, or its part from guidance and distillation, that is `deviations` above its level, or a step that is not finite,
    restores the last good state: the weights that train, the optimizer, buffers, the gradient scaler, averaged weights, and
    the alphas, which the schedule takes back over `recovery` steps. The run goes on with the next step and the next batch,
    whose random numbers are new too; so it has its number of steps and batches, and does not meet the same batch again.

    >>> Guard(every=50).retries
    3

    Args:
        deviations: How far a loss may be above the median of its last values, in robust standard deviations.
        window: Steps from which the deviation is taken.
        warmup: Steps before losses are judged, also after a jump of alpha; inf and NaN always count.
        every: Steps from one good state to the next.
        retries: Restores of the same good state, before the training stops.
        alpha: Added at the responsible sites, once more with each retry.
        slowdown: Factor of the learning rate after a restore, once more with each retry.
        recovery: Steps in which alphas and the learning rate come back.
    """

    deviations: PositiveFloat = 8.0
    window: PositiveInt = 64
    warmup: PositiveInt = 32
    every: PositiveInt = 20
    retries: PositiveInt = 3
    alpha: Unit = 0.1
    slowdown: Fraction = 0.5
    recovery: PositiveInt = 100

    @checked
    def watch(self, handover: Handover, optimizer: Optimizer, *, ema: RunningEma | None = None) -> GuardedSteps:
        """Guard a loop of one's own, from its first step on or after `segue.load_`; `fit` and the callbacks do this themselves.

            guard = segue.Guard().watch(handover, optimizer)
            ...
            loss.backward()
            if guard(loss):  # otherwise the last good state is back, and this step is left out
                optimizer.step()
            optimizer.zero_grad()
            handover.step()

        It has `state_dict`, `load_state_dict` and `events`. `ema` is an average of the weights, which then goes back too.
        """
        return GuardedSteps(self, handover, optimizer, ema)


@dataclass(frozen=True)
class Spike:
    """What is wrong with a step."""

    kind: str  # "loss", "divergence" or "not finite"
    step: int
    value: float
    level: float | None
    growth: list[float]  # of each site

    def __str__(self) -> str:
        usual = "" if self.level is None else f", after {self.level:.4g}"
        return f"{self.kind} {self.value:.4g}{usual}"


class RunningGuard:
    """The guard of one training: what it knows of its losses, and the last good state.

    The numbers that it judges are equal in all processes, so that all of them do the same.
    """

    def __init__(self, settings: Guard, good: GoodState, handover: Handover | None) -> None:
        self.settings, self.good, self.handover = settings, good, handover
        self.sites = [] if handover is None else list(handover.seams)
        sites = () if handover is None else handover.sites
        self.handing_over = {site.name for site in sites if handover and alpha_of(handover.plan, 0.0, site) > 0}
        self.loss, self.divergence = Series(settings.window), Series(settings.window)
        self.usual: list[float] = []  # of each site's error, then of each site's gradient norm
        self.seen = 0  # judged steps since the last jump
        self.retries = 0  # restores of the same good state
        self.due = 0  # the step of the next good state
        self.slow: list[Any] = [0, 0, 1.0]  # a factor of the rate, from one step until another
        self.events: list[dict[str, Any]] = []  # since the last evaluation
        self._regime: list[Any] = []
        self._alphas: dict[str, float] = {}

    @property
    def copied(self) -> int:
        """The bytes that the latest copy of a good state took."""
        return self.good.copied

    def begin(self, step: int) -> None:
        """Before a step: keep the first state, and forget a loss that the plan replaces by another one."""
        alphas = {} if self.handover is None else self.handover.alphas
        if self.good.step is None:
            self._keep(step)
        fall = max((before - alphas[name] for name, before in self._alphas.items()), default=0.0)
        regime = self._losses()
        if fall > JUMP or regime != self._regime:
            self.loss.clear()
            self.divergence.clear()
            self.usual, self.seen = [], 0
        self._alphas, self._regime = alphas, regime

    def rate(self, step: int) -> float:
        """Return the factor of the learning rate of a step.

        It is 1 unless the last restore was less than `recovery` steps ago.
        """
        since, until, factor = self.slow
        return 1.0 if step >= until else factor + (1.0 - factor) * max(0, step - since) / (until - since)

    def judge(self, step: int, measured: Sequence[float], *, finite: bool) -> Spike | None:
        """Return what is wrong with a step, before its update; keep a state that has just shown to be good.

        `measured` is the loss, its part from guidance and distillation, and the error and the gradient norm of each site.
        """
        loss, divergence, *of_sites = measured
        wrong = None if finite else ("not finite", loss, self.loss.level)
        if wrong is None and self.seen >= self.settings.warmup:
            for kind, value, series in (("loss", loss, self.loss), ("divergence", divergence, self.divergence)):
                if wrong is None and series.deviations(value) > self.settings.deviations:
                    wrong = kind, value, series.level
        if wrong is not None:
            return Spike(wrong[0], step, wrong[1], wrong[2], self._growth(of_sites))
        self.loss.add(loss)
        self.divergence.add(divergence)
        self.seen += 1
        share = 1 / min(self.seen, self.settings.window)
        self.usual = [was + (now - was) * share for was, now in zip(self.usual or of_sites, of_sites, strict=True)]
        if step >= self.due:
            self._keep(step)
        return None

    def restore(self, spike: Spike, advice: str, where: Callable[[], str] | None = None) -> None:
        """Go back to the last good state, raise alpha at the responsible sites and slow the next steps down.

        The error after the last retry has the advice, and where a value that is not finite comes from.
        """
        settings, step = self.settings, spike.step
        if self.retries >= settings.retries:  # a resume may allow fewer
            raise self._exhausted(spike, advice, where)
        self.retries += 1
        self.due = step + 1 + settings.every
        self.good.restore()
        if self.handover is not None:
            self.handover.local.load_state_dict(self.good.errors)
        sites = self._responsible(spike.growth)
        self._raise(sites)
        self.slow = [step + 1, step + 1 + settings.recovery, settings.slowdown**self.retries]
        value = spike.value if math.isfinite(spike.value) else None  # JSON has no other
        event = {"step": step, "kind": spike.kind, "value": value, "level": spike.level, "sites": sites}
        self.events.append({**event, "restored": self.good.step, "retry": self.retries, "rate": self.slow[2]})
        LOGGER.info("step %d: %s; the state of step %s is back (retry %d)", step, spike, self.good.step, self.retries)

    def take_events(self) -> list[dict[str, Any]]:
        """Return what has happened since the last evaluation."""
        events, self.events = self.events, []
        return events

    def _keep(self, step: int) -> None:
        handover = self.handover
        known = ({}, {}) if handover is None else (handover.alphas, handover.local.state_dict())
        self.good.keep(step, *known)
        self.due, self.retries = step + self.settings.every, 0

    def _losses(self) -> list[Any]:
        """Return what the loss of a step consists of."""
        if self.handover is None:
            return []
        held = [name for name, seam in self.handover.seams.items() if seam.state.hold]
        phase, auxiliary = self.handover.phase, self.handover.auxiliary
        return [None if phase is None else phase.name, held, list(auxiliary.guidance), auxiliary.distill > 0]

    def _growth(self, measured: Sequence[float]) -> list[float]:
        """Return by how much the error of each site exceeds what it usually is; where no site is guided, its gradient norm.

        An error belongs to its site, while a large gradient passes on to all sites before.
        """
        pairs = zip(measured, self.usual or [0.0] * len(measured), strict=True)
        grown = [math.inf if not math.isfinite(now) else now / usual if usual > 0 else 0.0 for now, usual in pairs]
        errors, norms = grown[: len(self.sites)], grown[len(self.sites) :]
        return errors if any(errors) else norms

    def _responsible(self, growth: Sequence[float]) -> list[str]:
        largest = max(growth, default=0.0)
        return [name for name, one in zip(self.sites, growth, strict=True) if one >= RESPONSIBLE * largest]

    def _raise(self, sites: Sequence[str]) -> None:
        """Give every site that has a teacher its alpha of the good state, and those that are responsible more."""
        if self.handover is None:
            return
        more = dict.fromkeys(sites, self.settings.alpha * self.retries)
        raised = {name: min(1.0, alpha + more.get(name, 0.0)) for name, alpha in self.good.alphas.items()}
        able = [name for name in self.handing_over if self.handover.seams[name].teacher is not None]
        up = {name: alpha for name, alpha in raised.items() if name in able and alpha > 0}
        self.handover.raise_alpha(up, over=self.settings.recovery)

    def _exhausted(self, spike: Spike, advice: str, where: Callable[[], str] | None) -> TrainingError:
        found = f" {where()}." if where is not None and spike.kind == "not finite" else ""
        return TrainingError(
            f"step {spike.step} fails again, after {self.retries} restores of the state of step {self.good.step}.",
            f"It has {spike}.{found}",
            f"{advice}; lower lr or clip, look at the batches, or let Guard bear more (deviations, retries).",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, for a checkpoint."""
        plain = {name: getattr(self, name) for name in ("usual", "seen", "retries", "due", "slow", "events")}
        series = {"loss": self.loss.state_dict(), "divergence": self.divergence.state_dict()}
        return {**plain, **series, "alphas": self._alphas, "regime": self._regime, "good": self.good.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as an earlier process would have."""
        counts = [state["seen"], state["retries"], state["due"], *state["slow"][:2]]
        if not all(type(count) is int and 0 <= count <= LONGEST for count in counts):
            raise ValueError(f"the guard counts {counts!r:.60}")
        *_, factor = state["slow"]
        in_order = len(state["slow"]) == 3 and state["slow"][0] <= state["slow"][1]
        if not (in_order and type(factor) is float and 0 < factor <= 1):
            raise ValueError(f"the guard slows the training down by {state['slow']!r:.60}")
        if len(numbers(state["usual"])) not in (0, 2 * len(self.sites)):
            raise ValueError(f"the guard knows {len(state['usual'])} numbers of {len(self.sites)} sites")
        numbers(list(state["alphas"].values()))
        if not (isinstance(state["events"], list) and all(isinstance(event, dict) for event in state["events"])):
            raise ValueError(f"the guard has the events {state['events']!r:.60}")
        if not {*state["alphas"]} == {*state["good"]["alphas"]} == {*self.sites}:
            raise ValueError(f"the guard knows the sites {list(state['alphas'])!r:.60}")
        self.loss.load_state_dict(state["loss"])
        self.divergence.load_state_dict(state["divergence"])
        self.good.load_state_dict(state["good"])
        for name in ("usual", "seen", "retries", "due", "slow", "events"):
            setattr(self, name, state[name])
        self._alphas, self._regime = state["alphas"], state["regime"]


class GuardedSteps:
    """The guard of a handover and its optimizer: `if guard(loss): optimizer.step()`."""

    def __init__(self, settings: Guard, handover: Handover, optimizer: Optimizer, ema: RunningEma | None = None) -> None:
        self.handover, self.parameters = handover, list(handover.parameters())
        if handover.total_steps is None:
            raise HandoverError(
                "a guard needs total_steps.",
                "What it raises must be back before the end, and the handover does not know how long the run is.",
                "give replace_(..., total_steps=n), or set handover.total_steps = n first.",
            )
        roots = [root for root in (handover.model, handover.auxiliary.original) if root is not None]
        self.guard = RunningGuard(settings, GoodState(self.parameters, optimizer, roots, None, ema), handover)
        self.guard.begin(handover.steps_done)
        handover.rates.slow_down(handover, optimizer, lambda: self.guard.rate(handover.steps_done))
        self._noted: list[Tensor] = []  # of each batch of this step

    @property
    def events(self) -> list[dict[str, Any]]:
        """What has been undone: at which step, why, at which sites, and what the guard went back to."""
        return self.guard.events

    @checked
    def __call__(self, loss: Tensor) -> bool:
        """Judge a step by its loss, after backward; return whether to take it, otherwise the last good state is back."""
        self.add(loss)
        spike = self.judge()
        if spike is not None:
            self.restore(spike)
        return spike is None

    @torch.no_grad()
    def add(self, loss: Tensor, errors: dict[str, Tensor] | None = None) -> None:
        """Note the loss of a batch, and what guidance and distillation add to it: those of `aux_loss`, or errors by site."""
        parts = self.handover.auxiliary.latest if errors is None else errors
        none, prefix = torch.zeros((), device=loss.device), "guidance/" if errors is None else ""
        here = {name: part.detach().float().to(loss.device) for name, part in parts.items()}
        of_sites = [here.get(prefix + name, none) for name in self.handover.seams]
        self._noted.append(torch.stack([loss.detach().float(), sum(here.values(), start=none), *of_sites]))

    @torch.no_grad()
    def judge(self) -> Spike | None:
        """Return what is wrong with a step, between its last backward and its update; nothing is changed."""
        if not self._noted:
            return None
        noted, self._noted = torch.stack(self._noted).mean(0), []
        norms = [full(nn.utils.get_total_norm(_gradients(seam.student.parameters()))) for seam in self.handover.seams.values()]
        bounded = full(nn.utils.get_total_norm(_gradients(self.parameters))).isfinite()
        numbers = torch.cat([noted, torch.stack([norm.to(noted) for norm in [bounded, *norms]])])
        processes = Processes.current(noted.device)
        means = (processes.total(numbers) / processes.world).tolist()  # the one wait for the device
        of_guard = 2 + len(norms)
        measured, (all_bounded, *of_norms) = means[:of_guard], means[of_guard:]
        finite = math.isfinite(measured[0]) and all_bounded == 1
        self.guard.begin(self.handover.steps_done)
        return self.guard.judge(self.handover.steps_done, [*measured, *of_norms], finite=finite)

    def restore(self, spike: Spike) -> None:
        """Go back to the last good state, raise alpha at the responsible sites and slow the next steps down."""
        self.guard.restore(spike, ADVICE)

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, tensors and plain data, for a checkpoint."""
        return self.guard.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as an earlier process would have."""
        self.guard.load_state_dict(state)


def _gradients(parameters: Any) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
