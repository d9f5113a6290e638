"""Losses that pull a student towards its teacher.

A guidance is any function (teacher output, student output, padding mask or None) -> scalar, applied at every site and summed.
The built-in ones also carry a weight (lambda) and a schedule for it; aggr20 is the default, as in the paper: the guidance
fades, so that it does not work against the task after takeover.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from segue import similarity
from segue.border import NotNegative, Rule, checked
from segue.errors import PlanError
from segue.schedules import Constant, Schedule, aggr20, alpha_at
from segue.sites import Site

__all__ = [
    "CkaGuidance",
    "CosineGuidance",
    "FeatureAxis",
    "FeatureGuidance",
    "GramGuidance",
    "LogitDistillation",
    "OnTeacherStream",
    "PairLoss",
    "PredictionDistillation",
    "weight_at",
]


def __dir__() -> list[str]:
    return sorted(__all__)


# (teacher, student, padding mask) -> scalar, a mean over samples; four dimensions arrive as (batch, channels, height, width)
PairLoss: TypeAlias = Annotated[
    Callable[[Tensor, Tensor, Tensor | None], Tensor],
    Rule("a function (teacher, student, mask) -> loss", hint="give segue.losses.FeatureGuidance(), or a function of your own."),
]


@dataclass(frozen=True, kw_only=True)
class _Weighted:
    weight: NotNegative = 1.0
    schedule: Schedule = field(default_factory=aggr20)


@checked
@dataclass(frozen=True, kw_only=True)
class FeatureGuidance(_Weighted):
    """Deep Feature Guidance (DFG, equation 3): the squared L2 distance of the two outputs.

    scale="relative", the default: each sample divided by its own teacher's mean square, so that a weight means the same at
    every width, late sites, whose outputs are larger, do not dominate, and every split of a batch gives the same number.
    scale="paper": squared L2 per token, averaged over each sample's tokens and over the batch; grows with the width.

    >>> FeatureGuidance()(torch.ones(1, 3, 4), torch.zeros(1, 3, 4), None)
    tensor(1.)

    Args:
        weight: Factor of the loss.
        schedule: Times the weight, by progress; by default falls to 0 as alpha does.
        scale: "relative" or "paper", as above.
    """

    scale: Literal["relative", "paper"] = "relative"

    def __call__(self, teacher: Tensor, student: Tensor, mask: Tensor | None) -> Tensor:
        error = similarity.squared_error if self.scale == "paper" else similarity.relative_error
        return error(teacher, student, mask).mean()


@checked
@dataclass(frozen=True, kw_only=True)
class CosineGuidance(_Weighted):
    """One minus the cosine of each token's two vectors, averaged: direction only.

    Args:
        weight: Factor of the loss.
        schedule: Times the weight, by progress; by default falls to 0 as alpha does.
    """

    def __call__(self, teacher: Tensor, student: Tensor, mask: Tensor | None) -> Tensor:
        return 1 - similarity.cosine(teacher, student, mask)


@checked
@dataclass(frozen=True, kw_only=True)
class GramGuidance(_Weighted):
    """The relative squared distance of the feature Gram matrices; a statistic of the batch.

    Args:
        weight: Factor of the loss.
        schedule: Times the weight, by progress; by default falls to 0 as alpha does.
    """

    def __call__(self, teacher: Tensor, student: Tensor, mask: Tensor | None) -> Tensor:
        return similarity.gram_error(teacher, student, mask)


@checked
@dataclass(frozen=True, kw_only=True)
class CkaGuidance(_Weighted):
    """One minus linear CKA: equal up to rotation and scale; a statistic of the batch.

    Args:
        weight: Factor of the loss.
        schedule: Times the weight, by progress; by default falls to 0 as alpha does.
    """

    def __call__(self, teacher: Tensor, student: Tensor, mask: Tensor | None) -> Tensor:
        return 1 - similarity.linear_cka(teacher, student, mask)


@dataclass(frozen=True, kw_only=True)
class _Wrapping:
    then: PairLoss = field(default_factory=FeatureGuidance)

    @property
    def weight(self) -> float:
        return weight_of(self.then)

    @property
    def schedule(self) -> Schedule:
        return _schedule(self.then)


@checked
@dataclass(frozen=True, kw_only=True)
class OnTeacherStream(_Wrapping):
    """Compare with the teacher's own stream: its outputs in a full pass of the original model (FitNets).

    Without this wrapper the teacher reads the student's input, which costs only the forward of the replaced modules.

    Args:
        then: The guidance that compares the two streams.
    """

    def __call__(self, teacher: Tensor, student: Tensor, mask: Tensor | None) -> Tensor:
        return self.then(teacher, student, mask)


@checked
@dataclass(frozen=True, kw_only=True)
class FeatureAxis(_Wrapping):
    """Say which axis of the outputs holds the features, instead of letting the layers at each site tell.

    The guidance inside gets the outputs with their features where it reads them.

    Args:
        then: The guidance inside.
        axis: The axis of the features.
    """

    axis: int = -1

    def __post_init__(self) -> None:
        if isinstance(self.then, OnTeacherStream):
            raise PlanError(
                "FeatureAxis(then=OnTeacherStream(...)) is in the wrong order.",
                "The stream decides which outputs are compared, the axis how they are read.",
                "write OnTeacherStream(then=FeatureAxis(axis=..., then=...)).",
            )

    def __call__(self, teacher: Tensor, student: Tensor, mask: Tensor | None) -> Tensor:
        t, s = (similarity.move_features(output, self.axis) for output in (teacher, student))
        return self.then(t, s, mask)


def stated_axis(guidance: object) -> int | None:
    """Return the axis of the features that a guidance states, or None."""
    inner = guidance.then if isinstance(guidance, OnTeacherStream) else guidance
    return inner.axis if isinstance(inner, FeatureAxis) else None


class TopProbabilities(NamedTuple):
    """The teacher's k most probable classes of each token and the mass of all others, at one temperature.

    KL of these k + 1 probabilities, sum p_i log(p_i / q_i) over the k classes plus p_rest log(p_rest / q_rest), is never above
    the KL of all classes (data processing inequality), and equal to it if k is their number.
    """

    classes: Tensor  # (..., k)
    logs: Tensor  # (..., k + 1), natural logarithms; the last is of the rest, and as low as can be where there is none

    def coarse(self, logs: Tensor) -> Tensor:
        """Return the log-probabilities of the same k classes, and of the rest, for another model's of all classes."""
        inside = logs.gather(-1, self.classes)
        if inside.shape == logs.shape:  # nothing is left, and its logarithm would have no gradient
            return torch.cat([inside, torch.zeros_like(inside[..., :1])], -1)
        rest = logs.scatter(-1, self.classes, -torch.inf).logsumexp(-1, keepdim=True)  # not 1 - sum, which rounds to 0
        return torch.cat([inside, rest], -1)


Temperature: TypeAlias = Annotated[float, Rule("a positive number of at most 1000", lambda value: 0 < value <= 1000)]


@checked
@dataclass(frozen=True, kw_only=True)
class LogitDistillation:
    """Soften both models' logits by a temperature and take KL(teacher || student), times temperature squared.

    `logits` takes them from what the model returns; by default the `logits` of a Hugging Face output, or the first
    floating tensor. With (batch, tokens, classes), each token is a distribution and padding is left out. The teacher may also
    be given by its most probable classes, as `segue.cache_teacher` keeps them.

    >>> LogitDistillation(temperature=2.0)(torch.ones(1, 3), torch.ones(1, 3), None)
    tensor(0.)

    Args:
        weight: Factor of the loss.
        temperature: Both logits are divided by it; its square keeps the gradient's size.
        schedule: Times the weight, by progress; by default always 1.
        logits: A function from what the model returns to its logits.
    """

    weight: NotNegative = 1.0
    temperature: Temperature = 4.0
    schedule: Schedule = field(default_factory=lambda: Constant(alpha=1.0))
    logits: Callable[[Any], Tensor] | None = None

    def __call__(self, teacher: Tensor | TopProbabilities, student: Tensor, mask: Tensor | None) -> Tensor:
        theirs = teacher if isinstance(teacher, TopProbabilities) else (teacher,)
        divergence = similarity.in_pieces(self._divergence, student, *theirs)
        if divergence.dim() == 2:
            divergence = similarity.average(divergence, mask)
        return divergence.mean() * self.temperature**2

    def _divergence(self, student: Tensor, *teacher: Tensor) -> Tensor:
        """Return KL for every row, from logits or from the members of `TopProbabilities`."""
        s = F.log_softmax(_float(student) / self.temperature, dim=-1)
        if len(teacher) == 2:
            top = TopProbabilities(*teacher)
            t, s = top.logs.to(s.dtype), top.coarse(s)
        else:
            t = F.log_softmax(_float(teacher[0]) / self.temperature, dim=-1)
        return F.kl_div(s, t, reduction="none", log_target=True).sum(-1)


@checked
@dataclass(frozen=True, kw_only=True)
class PredictionDistillation:
    """The mean squared error of the two models' predictions: what KL is for classes, for a diffusion model's noise or velocity.

    `prediction` takes them from what the model returns; by default the `sample` of a diffusers output, or the first floating
    tensor. A model that also predicts variances takes prediction=lambda output: output.sample.chunk(2, dim=1)[0].

    Args:
        weight: Factor of the loss.
        schedule: Times the weight, by progress; by default always 1.
        prediction: A function from what the model returns to its prediction.
    """

    weight: NotNegative = 1.0
    schedule: Schedule = field(default_factory=lambda: Constant(alpha=1.0))
    prediction: Callable[[Any], Tensor] | None = None

    def __call__(self, teacher: Tensor, student: Tensor, mask: Tensor | None) -> Tensor:
        error = (_float(student) - _float(teacher)).square()
        if mask is not None and error.dim() == 3:  # (batch, tokens, features), as of a sequence
            return similarity.average(error.mean(-1), mask).mean()
        return error.mean()


def weight_at(loss: object, progress: float, site: Site, least: float = 0.0) -> float:
    """Return lambda, the weight of a loss at this progress; a plain function has weight 1 and the schedule aggr20.

    >>> weight_at(FeatureGuidance(weight=2.0, schedule=Constant(alpha=0.5)), 0.1, Site("x"))
    1.0

    Args:
        loss: A loss of a plan.
        progress: The fraction of the run that is done.
        site: Where.
        least: A fraction of the full weight below which its schedule does not go.
    """
    return weight_of(loss) * max(least, alpha_at(_schedule(loss), progress, site))


def is_relative_error(guidance: object) -> bool:
    """Tell whether the value of a guidance is the mean relative error of the outputs."""
    while isinstance(guidance, _Wrapping):
        guidance = guidance.then
    return type(guidance) is FeatureGuidance and guidance.scale == "relative"


def weight_of(loss: object) -> float:
    """Return the weight of a loss without its schedule; a plain function has weight 1."""
    weight = getattr(loss, "weight", 1.0)
    try:
        return float(weight + 0)  # a string has no sum with a number
    except (TypeError, ValueError, RuntimeError):
        raise PlanError(
            f"the weight of a loss must be a number, got {type(weight).__name__}.",
            f"It is the attribute `weight` of {type(loss).__name__}.",
            "give the loss a number there, or another name to what it holds.",
        ) from None


def _schedule(loss: object) -> Schedule:
    schedule: Schedule | None = getattr(loss, "schedule", None)
    return aggr20() if schedule is None else schedule


def _float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
