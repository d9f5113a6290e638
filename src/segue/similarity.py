"""How similar two outputs are: the one place with these formulas.

Outputs are read as (batch, tokens, features). Four dimensions are read as a convolution's (batch, channels, height, width),
two as one token per sample; in all other shapes the last dimension holds the features. Where a site's module returns another
order, as torchvision's Swin does, `feature_axis` finds it and `move_features` puts the features where they are read. Sums are
taken in float32 at least. A complex vector is compared as the real vector of its two parts, so the inner product is the real
part of the Hermitian one. A mask of shape (batch, tokens) is true, or 1, where a token counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.display import Shown, Table, pandas
from segue.errors import PlanError

__all__ = [
    "Similarities",
    "Similarity",
    "cosine",
    "divergence",
    "feature_axis",
    "gram_error",
    "linear_cka",
    "measure",
    "move_features",
    "relative_error",
    "squared_error",
]


def __dir__() -> list[str]:
    return sorted(__all__)


FLOOR = 1e-6  # root mean square of a teacher's output: beside a stream of size 1, what is smaller is rounding in float32

PIECE = 2**19  # logits that a processor compares at once: they stay in its cache

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CHANNELS_FIRST = (*_CONVOLUTIONS, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.InstanceNorm2d)
_FEATURES_LAST = (nn.Linear, nn.LayerNorm)


class Similarity(NamedTuple):
    """What `handover.similarity` measures at one site."""

    cosine: float
    cka: float
    gram_distance: float
    relative_error: float


class Similarities(Shown, dict[str, Similarity]):
    """What `handover.similarity` measures, by site; a notebook shows it as a table."""

    def to_pandas(self) -> Any:
        """Return a data frame with a row for each site; needs pandas."""
        frame = pandas("similarity(...).to_pandas()").DataFrame([*self.values()], columns=Similarity._fields, index=[*self])
        return frame.rename_axis("site")

    def __repr__(self) -> str:
        return self._table().text()

    def _table(self) -> Table:
        headings = ("site", *(name.replace("_", " ") for name in Similarity._fields))
        rows = [(name, *(f"{value:.4f}" for value in found)) for name, found in self.items()]
        return Table("similarity of teacher and student", headings, rows)


def measure(teacher: Tensor, student: Tensor, mask: Tensor | None = None) -> Similarity:
    """Take all four measures at once.

    >>> teacher, student = torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    >>> measure(teacher, 2 * student).relative_error
    1.0

    Args:
        teacher: The teacher's output.
        student: The student's output, of the same shape.
        mask: (batch, tokens), true or 1 where a token counts.
    """
    return Similarity(*(one.item() for one in measured(Similarity._fields, teacher, student, mask)))


def measured(names: Iterable[str], teacher: Tensor, student: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    """Take some of the measures of Similarity; nothing waits for the device."""
    formulas: dict[str, Callable[[], Tensor]] = {
        "cosine": lambda: cosine(teacher, student, mask),
        "cka": lambda: linear_cka(teacher, student, mask),
        "gram_distance": lambda: gram_error(teacher, student, mask).sqrt(),
        "relative_error": lambda: relative_error(teacher, student, mask).mean().sqrt(),
    }
    return [formulas[name]() for name in names]


def cosine(teacher: Tensor, student: Tensor, mask: Tensor | None = None) -> Tensor:
    """Average the cosine of each token's two feature vectors.

    >>> teacher, student = torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    >>> cosine(teacher, -student).item()
    -1.0

    Args:
        teacher: The teacher's output.
        student: The student's output, of the same shape.
        mask: (batch, tokens), true or 1 where a token counts.
    """
    t, s = (as_real(tokens).flatten(2) for tokens in _both(teacher, student))
    alike: Tensor = torch.nn.functional.cosine_similarity(t, s, dim=-1)
    return average(alike, mask).mean()


def squared_error(teacher: Tensor, student: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return each sample's squared L2 distance per token, averaged over its tokens: (batch,).

    >>> teacher, student = torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    >>> squared_error(teacher, 2 * student).tolist()
    [4.0, 4.0]

    Args:
        teacher: The teacher's output.
        student: The student's output, of the same shape.
        mask: (batch, tokens), true or 1 where a token counts.
    """
    t, s = _both(teacher, student)
    return average(_square(s - t).sum(-1), mask)


def relative_error(teacher: Tensor, student: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return each sample's squared error divided by its own teacher's mean square: (batch,).

    A teacher's output counts as at least FLOOR in each feature, so that one of zeros gives a finite error and gradient.

    >>> teacher, student = torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    >>> relative_error(teacher, 3 * student).tolist()
    [4.0, 4.0]

    Args:
        teacher: The teacher's output.
        student: The student's output, of the same shape.
        mask: (batch, tokens), true or 1 where a token counts.
    """
    t = as_tokens(teacher)
    energy = average(_square(t).sum(-1), mask)
    return squared_error(teacher, student, mask) / energy.clamp_min(t.shape[-1] * FLOOR**2)


def gram_error(teacher: Tensor, student: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compare the feature Gram matrices X'X: their squared distance over the teacher's squared norm, which has a floor too.

    >>> teacher, student = torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    >>> gram_error(teacher, -student).item()
    0.0

    Args:
        teacher: The teacher's output.
        student: The student's output, of the same shape.
        mask: (batch, tokens), true or 1 where a token counts.
    """
    t, s = (_rows(tokens, mask) for tokens in _both(teacher, student))
    gram_t, gram_s = t.mH @ t, s.mH @ s
    floor = (len(t) * FLOOR**2) ** 2 * t.shape[1]  # of independent features with a mean square of FLOOR**2
    return _square(gram_s - gram_t).sum() / _square(gram_t).sum().clamp_min(floor)


def linear_cka(teacher: Tensor, student: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return linear centred kernel alignment over all tokens of the batch, 1 for equal up to rotation and scale.

    >>> teacher = torch.randn(2, 3, 4)
    >>> round(linear_cka(teacher, 2 * teacher).item(), 4)
    1.0

    Args:
        teacher: The teacher's output.
        student: The student's output, of the same shape.
        mask: (batch, tokens), true or 1 where a token counts.
    """
    t, s = (_rows(tokens, mask) for tokens in _both(teacher, student, widths=False))
    t, s = t - t.mean(0), s - s.mean(0)
    across = _square(t.mH @ s).sum()
    norms: Tensor = torch.linalg.matrix_norm(t.mH @ t) * torch.linalg.matrix_norm(s.mH @ s)
    return across / norms.clamp_min(torch.finfo(t.dtype).tiny)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(teacher || student) of logits, in nats, for every distribution: (..., classes) -> (...).

    >>> teacher, student = torch.zeros(2, 3), torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    >>> [round(value, 3) for value in divergence(teacher, student).tolist()]
    [0.0, 0.119]

    Args:
        teacher: The original's logits; the last dimension holds the classes.
        student: Those of the other model, of the same shape.
    """
    for output in (teacher, student):
        _require_tensor(output, "an output")
    if teacher.shape != student.shape:
        raise _of_different_shapes(teacher, student)
    return in_pieces(_divergence, student, teacher).clamp_min(0)


def _divergence(student: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)


def in_pieces(compare: Callable[..., Tensor], student: Tensor, *teacher: Tensor) -> Tensor:
    """Return compare(student, *teacher), one number for each row of logits; on a processor a few rows at a time.

    The logits of a large vocabulary do not fit into its cache, and every operation on all of them waits for memory: KL and its
    gradient by pieces, which the backward computes again instead of keeping them, take a fifth of the time and no memory.
    """
    whole = student.device.type != "cpu" or student.numel() <= PIECE or torch.compiler.is_compiling()
    if whole or any(x.requires_grad for x in teacher):
        return compare(student, *teacher)
    rows = [x.flatten(0, -2) for x in (student, *teacher)]
    size = max(1, PIECE // student.shape[-1])
    if torch.is_grad_enabled() and student.requires_grad:
        found: Tensor = _InPieces.apply(compare, size, *rows)  # type: ignore[no-untyped-call]
    else:
        found = _by_pieces(compare, size, rows)
    return found.view(student.shape[:-1])


def _by_pieces(compare: Callable[..., Tensor], size: int, rows: Iterable[Tensor]) -> Tensor:
    return torch.cat([compare(*piece) for piece in zip(*(torch.split(x, size) for x in rows), strict=True)])


class _InPieces(torch.autograd.Function):
    """Compare rows of logits piece by piece, and compute each piece again for its gradient."""

    @staticmethod
    def forward(ctx: Any, compare: Callable[..., Tensor], size: int, *rows: Tensor) -> Tensor:
        ctx.save_for_backward(*rows)
        ctx.compare, ctx.size = compare, size
        return _by_pieces(compare, size, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        student, *teacher = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative
            (found,) = torch.autograd.grad(ctx.compare(student, *teacher), student, gradient, create_graph=True)
        else:
            found = torch.empty_like(student)
            parts = [torch.split(x, ctx.size) for x in (found, gradient, student, *teacher)]
            for place, of, ours, *theirs in zip(*parts, strict=True):
                with torch.enable_grad():
                    leaf = ours.detach().requires_grad_()
                    compared = ctx.compare(leaf, *theirs)
                place.copy_(torch.autograd.grad(compared, leaf, of)[0])
        return None, None, found, *(None for _ in teacher)


def as_tokens(output: Tensor) -> Tensor:
    """Read an output as (batch, tokens, features) in float32 or complex64 at least."""
    _require_tensor(output, "an output")
    if output.numel() == 0:
        raise PlanError(
            "outputs without samples cannot be compared.",
            f"Their shape is {tuple(output.shape)}.",
            "leave an empty batch out.",
        )
    x = output.to(torch.promote_types(output.dtype, torch.float32))
    if x.dim() == 4:
        return x.flatten(2).transpose(1, 2)
    if x.dim() < 2:
        return x.reshape(1, 1, -1)
    return x.reshape(x.shape[0], -1, x.shape[-1])


def samples(output: Tensor) -> int:
    """Count the samples of an output as `as_tokens` reads it."""
    return 0 if output.numel() == 0 else output.shape[0] if output.dim() >= 2 else 1


def move_features(output: Tensor, axis: int) -> Tensor:
    """Put the features of an output, which are at this axis, where they are read.

    >>> move_features(torch.zeros(2, 7, 7, 8), -1).shape
    torch.Size([2, 8, 7, 7])

    Args:
        output: What a module returned.
        axis: Where its features are: that of `feature_axis`.
    """
    if axis == 0 or not -output.dim() < axis < output.dim():
        raise PlanError(
            f"axis {axis} cannot hold the features.",
            f"The output has shape {tuple(output.shape)}, with the batch at axis 0.",
            "name another axis, such as -1.",
        )
    return output.movedim(axis, _usual_axis(output)) if output.dim() > 2 else output


def feature_axis(modules: Iterable[nn.Module], output: Tensor) -> int:
    """Find the axis of the features, 1 or -1: that whose size the layers of the module return which made the output.

    If both sizes occur, the features are last where there are only layers that act on the last dimension.

    >>> feature_axis([nn.LayerNorm(8)], torch.zeros(2, 7, 7, 8)), feature_axis([nn.Conv2d(3, 8, 1)], torch.zeros(2, 8, 7, 7))
    (-1, 1)

    Args:
        modules: The module and then those around it: the first in which one of the two sizes occurs decides.
        output: What the module returned.
    """
    usual = _usual_axis(output)
    if output.dim() < 3:
        return usual
    for module in modules:
        layers = list(module.modules())
        widths = {width for layer in layers for width in _widths(layer)}
        first, last = output.shape[1] in widths, output.shape[-1] in widths
        if not (first or last):
            continue
        channels_first = any(isinstance(layer, _CHANNELS_FIRST) for layer in layers)
        if last and not first:
            return -1
        if first and not last:
            return 1 if channels_first else usual
        return -1 if not channels_first and any(type(layer) in _FEATURES_LAST for layer in layers) else usual
    return usual


def _widths(layer: nn.Module) -> Iterable[int]:
    """Yield the numbers of features that a layer's own parameters return: the rows of a weight, the columns of an embedding."""
    columns = isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    return (p.shape[-1 if columns else 0] for p in layer.parameters(recurse=False) if p.dim() > 0)


def _usual_axis(output: Tensor) -> int:
    return 1 if output.dim() == 4 else -1


def _square(x: Tensor) -> Tensor:
    return x.real.square() + x.imag.square() if x.is_complex() else x.square()


def as_real(x: Tensor) -> Tensor:
    """Return a complex tensor with its two parts in one more dimension, and a real one as it is."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def average(per_token: Tensor, mask: Tensor | None) -> Tensor:
    """Average each sample over the tokens that count: (batch, tokens) -> (batch,)."""
    _require_tensor(per_token, "what is averaged")
    if per_token.dim() < 2:
        found = f"It has shape {tuple(per_token.shape)}."
        raise PlanError("what is averaged must have one number per token.", found, "give a tensor of shape (batch, tokens).")
    if mask is None:
        return per_token.mean(1)
    counts = _checked(mask, per_token).to(per_token.dtype)
    # where, not *: a padded token may hold inf or NaN
    return torch.where(counts > 0, per_token, 0).sum(1) / counts.sum(1).clamp_min(1)


def _both(teacher: Tensor, student: Tensor, *, widths: bool = True) -> tuple[Tensor, Tensor]:
    """Read two outputs as tokens, and refuse those that cannot be compared token by token."""
    t, s = as_tokens(teacher), as_tokens(student)
    if t.shape[:2] != s.shape[:2] or (widths and t.shape[2] != s.shape[2]):
        raise _of_different_shapes(teacher, student)
    return t, s


def _of_different_shapes(teacher: Tensor, student: Tensor) -> PlanError:
    return PlanError(
        "outputs of different shapes cannot be compared.",
        f"The teacher's has shape {tuple(teacher.shape)}, the student's {tuple(student.shape)}.",
        "give two outputs for the same tokens.",
    )


def _require_tensor(value: object, what: str) -> None:
    if not isinstance(value, Tensor):
        raise PlanError(
            f"{what} must be a tensor, got {type(value).__name__}.",
            "Measures compare the tensors that modules return.",
            "give a torch.Tensor.",
        )


def _rows(x: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return x.flatten(0, 1)
    return x[_checked(mask, x).bool()]


def _checked(mask: Tensor, tokens: Tensor) -> Tensor:
    _require_tensor(mask, "the mask")
    if mask.shape != tokens.shape[:2]:
        raise PlanError(
            f"the mask has shape {tuple(mask.shape)}.",
            f"The outputs at this site have (batch, tokens) = {tuple(tokens.shape[:2])}.",
            "give one value per token, 1 where it counts and 0 where it is padding.",
        )
    return mask
