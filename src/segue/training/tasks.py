"""Tasks: the loss that a model trains on, and the scores that evaluate it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.border import Rule, Unit, checked
from segue.errors import ConfigError, DataError

if TYPE_CHECKING:
    from segue.core.handover import Handover

TORCHS_OWN = ("torch.nn.modules.loss", "torch.nn.functional")  # take outputs and targets, not the model
LossFn: TypeAlias = Annotated[  # (model, batch) -> scalar
    Callable[[nn.Module, Any], Tensor],
    Rule(
        "a function (model, batch) -> loss",
        lambda value: getattr(value, "__module__", None) not in TORCHS_OWN,
        hint="give segue.Classification(), or for example lambda model, batch: F.mse_loss(model(batch[0]), batch[1]).",
    ),
]
Scores: TypeAlias = Callable[[nn.Module, Any], Mapping[str, Tensor]]  # (model, batch) -> one number per example, by name


def output_mask(loss_fn: object, batch: Any) -> Tensor | None:
    """Return which outputs of the model count in a batch, where a task knows that, as of the replies in a chat."""
    mask = getattr(loss_fn, "output_mask", None)
    return mask(batch) if callable(mask) else None


def task_loss(loss_fn: LossFn, model: nn.Module, batch: Any, handover: Handover | None) -> Tensor:
    """Return the loss of the task with the weight that the phase gives it.

    Where distillation alone counts, a task that has `forward_only` just runs the model: over a large vocabulary a loss that
    nobody adds costs as much as a few layers.
    """
    if handover is None:
        return scalar(loss_fn(model, batch))
    forward_only = getattr(loss_fn, "forward_only", None)
    unused = handover.phase is not None and handover.phase.task == 0 and handover.auxiliary.distill > 0
    if unused and callable(forward_only):
        return torch.zeros((), device=forward_only(model, batch).device)
    return handover.weighted(scalar(loss_fn(model, batch)))


def quality_of(loss_fn: Any, scores: Mapping[str, float]) -> str:
    """Write the score by which a task is judged: the one that it names, such as perplexity, else the accuracy if there is one.

    >>> quality_of(Classification(), {"accuracy": 0.5, "loss": 1.2})
    'accuracy 0.500'
    """
    if scores and hasattr(loss_fn, "quality") and hasattr(loss_fn, "of"):
        return f"{loss_fn.quality} {loss_fn.of(scores):.4g}{loss_fn.unit}"
    return f"accuracy {scores['accuracy']:.3f}" if "accuracy" in scores else ""


def scalar(loss: object) -> Tensor:
    """Return what a loss function returned, and refuse what is not one number as a tensor."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__} {loss!r:.60}"
    raise ConfigError(
        "loss_fn must return a scalar tensor.", f"It returns {found}.", "return the mean loss of the batch, with its gradient."
    )


def require_gradient(loss: Tensor) -> None:
    """Refuse a loss that nothing can learn from."""
    if not loss.requires_grad:
        raise ConfigError(
            "the loss has no gradient.",
            "Nothing that trains takes part in it.",
            "compute it in loss_fn with the model that it gets, without detach() or torch.no_grad().",
        )


class Classification:
    """Cross-entropy on (inputs, labels), or on a mapping with `labels`; `scores` returns accuracy and loss.

    >>> import torch
    >>> task = Classification(label_smoothing=0.1)
    >>> task(nn.Identity(), (torch.eye(3), torch.tensor([0, 1, 2]))).item() > 0
    True
    """

    @checked
    def __init__(self, *, label_smoothing: Unit = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        logits, labels = self._predict(model, batch)
        return F.cross_entropy(logits.float(), labels, label_smoothing=self.label_smoothing)

    def scores(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return accuracy and (unsmoothed) loss of every example."""
        logits, labels = self._predict(model, batch)
        loss = F.cross_entropy(logits.float(), labels, reduction="none")
        return {"accuracy": (logits.argmax(-1) == labels).float(), "loss": loss}

    def _predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
            named = {name: value for name, value in batch.items() if name != "labels"}
            output, labels = model(**named), batch["labels"]
        elif isinstance(batch, tuple | list) and len(batch) > 1 and isinstance(batch[-1], Tensor):
            *inputs, labels = batch
            output = model(*inputs)
        else:  # also a tensor, which would come apart into its rows
            raise DataError(
                "Classification needs batches of inputs and labels.",
                f"A batch is {_described(batch)}.",
                'give (inputs, labels), a mapping with "labels", or a loss_fn(model, batch) of your own.',
            )
        return getattr(output, "logits", output), labels


def _described(batch: object) -> str:
    if isinstance(batch, Tensor):
        return f"a tensor of shape {tuple(batch.shape)}"
    names = [str(name) for name in batch] if isinstance(batch, Mapping) else []
    inside = [type(each).__name__ for each in batch] if isinstance(batch, tuple | list) else names
    return f"a {type(batch).__name__}" + (f" of {', '.join(inside):.60}" if inside else "")
