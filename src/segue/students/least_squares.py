"""Least squares: fit a student's last linear layer to its teacher's outputs, in closed form and not far from where it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from segue.border import NotNegative, Rule, checked
from segue.errors import DataError, StudentError
from segue.sites import Site
from segue.students.calibration import Stream

__all__ = ["LeastSquares"]

STRENGTHS = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
Folds: TypeAlias = Annotated[int, Rule("an integer of at least 2", lambda value: 2 <= value <= 100)]


@checked
@dataclass(frozen=True, kw_only=True)
class LeastSquares:
    """Fit the student's last linear layer to the teacher's outputs by ridge regression; see `handover.calibrate`.

    The ridge pulls towards the present weights. Its strength, relative to the mean square of the features, is the one of
    `ridge` with the lowest error on samples that are held out, in turn one of every `folds`; where none lowers it, the student
    stays as it is. `stream` is whose outputs reach a site: those of the students before it, fitted first, or the teachers'.
    `output` names the linear layer in students that have no `output_projection`.
    """

    ridge: NotNegative | tuple[NotNegative, ...] = STRENGTHS
    output: str | None = None
    folds: Folds = 4
    stream: Stream = "student"

    def __call__(self, student: nn.Module, originals: Mapping[str, Any]) -> None:
        """Refuse to initialise a student without data; a file of version 0.1.0 may say so."""
        raise StudentError(
            "LeastSquares() cannot initialise a student.",
            "It fits the student to outputs of its teacher, which need data.",
            "call handover.calibrate(batches, LeastSquares()) before training.",
        )

    @checked
    def projection(self, student: nn.Module, site: Site) -> nn.Linear:
        """Find the linear layer to fit."""
        if self.output is None:
            found = getattr(student, "output_projection", student)
        else:
            found = dict(student.named_modules()).get(self.output)
        if not isinstance(found, nn.Linear):
            missing = "output_projection" if self.output is None else f"linear layer {self.output!r}"
            layers = ", ".join(name for name, part in student.named_modules() if isinstance(part, nn.Linear)) or "none"
            raise StudentError(
                f"LeastSquares() finds no output projection in the student at site {site.name!r}.",
                f"{type(student).__name__} has no {missing}; its linear layers are {layers}.",
                "name its last linear layer: LeastSquares(output='proj'). Where the output projection is outside the site, "
                "as with BERT's attention.self, there is none to fit. Nothing was changed.",
            )
        return found

    @checked
    def observer(self, teacher: nn.Module, student: nn.Module, site: Site) -> Regression:
        """Begin at one site."""
        strengths = self.ridge if isinstance(self.ridge, tuple | list) else (self.ridge,)
        return Regression(student, site, self.projection(student, site), strengths, self.folds)


class RegressionSums:
    """The sums over tokens that a weighted ridge regression of residuals on features needs."""

    def __init__(self, features: int, targets: int, device: torch.device) -> None:
        device = torch.device("cpu") if device.type == "mps" else device  # which has no float64

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.count, self.weight, self.square, self.missed = zeros(), zeros(), zeros(), zeros()
        self.of_features, self.of_residuals = zeros(features), zeros(targets)
        self.gram, self.cross = zeros(features, features), zeros(features, targets)

    def add(self, x: Tensor, y: Tensor, guess: Tensor, weight: Tensor) -> None:
        """Add tokens: features (n, f), targets (n, t), what the student returns before the fit, and weights (n,)."""
        x, y, guess, w = (part.to(self.gram) for part in (x, y, guess, weight))
        residual = y - guess
        weighted = x * w[:, None]
        self.count += len(x)
        self.weight += w.sum()
        self.of_features += weighted.sum(0)
        self.of_residuals += w @ residual
        self.gram += weighted.T @ x
        self.cross += weighted.T @ residual
        self.square += w @ y.square().sum(1)
        self.missed += w @ residual.square().sum(1)

    def all(self) -> list[Tensor]:
        return list(vars(self).values())

    @classmethod
    def joined(cls, parts: Sequence[RegressionSums]) -> RegressionSums:
        """Return the sums over all tokens of several."""
        features, targets = parts[0].cross.shape
        result = cls(features, targets, parts[0].cross.device)
        for part in parts:
            for total, value in zip(result.all(), part.all(), strict=True):
                total += value
        return result

    def changes(self, strengths: tuple[float, ...], with_bias: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for every strength, the changes of weight (features, targets) and bias that minimise error plus ridge."""
        total = self.weight if with_bias else self.weight.new_full((), torch.inf)
        gram = self.gram - torch.outer(self.of_features, self.of_features) / total
        cross = self.cross - torch.outer(self.of_features, self.of_residuals) / total
        values, vectors = torch.linalg.eigh(gram)
        found = values > values[-1] * torch.finfo(values.dtype).eps * len(values)
        turned = torch.where(found[:, None], vectors.T @ cross, 0.0)
        for strength in strengths:
            penalised = torch.where(found, values + strength * values.mean(), 1.0)
            weight = vectors @ (turned / penalised[:, None])
            yield weight, (self.of_residuals - weight.T @ self.of_features) / total

    def error(self, weight: Tensor, bias: Tensor) -> float:
        """Return the squared error that is left after a change."""
        left = self.missed - 2 * ((weight * self.cross).sum() + bias @ self.of_residuals)
        left += (weight * (self.gram @ weight)).sum() + 2 * bias @ (weight.T @ self.of_features)
        return max(0.0, (left + self.weight * bias.square().sum()).item())


class Regression:
    """The regression at one site, with sums for each fold of the samples."""

    def __init__(self, student: nn.Module, site: Site, linear: nn.Linear, strengths: tuple[float, ...], folds: int) -> None:
        self.site, self.linear, self.strengths = site, linear, strengths
        self.name = next(name for name, part in student.named_modules() if part is linear)
        self.folds = [RegressionSums(linear.in_features, linear.out_features, linear.weight.device) for _ in range(folds)]
        self._samples = 0
        self._calls: list[tuple[Tensor, Tensor]] = []  # features and outputs of the linear layer, not yet observed

    def hooks(self) -> list[RemovableHandle]:
        return [self.linear.register_forward_hook(lambda _, args, output: self._calls.append((args[0], output)))]

    def observe(self, teacher: Tensor, student: Tensor, mask: Tensor | None) -> None:
        features = self._features_of(student)
        if features is None:
            raise StudentError(
                f"LeastSquares() cannot fit the student at site {self.site.name!r}.",
                "Its output is not the output of the linear map to fit: something comes after it.",
                "name the student's last linear map, or leave calibration out. Nothing was changed.",
            )
        x, y, guess = (part.reshape(-1, part.shape[-1]) for part in (features, teacher, student))
        samples, tokens = len(teacher), len(x) // max(1, len(teacher))
        fold = (torch.arange(samples, device=x.device) + self._samples).repeat_interleave(tokens) % len(self.folds)
        self._samples += samples
        counts = torch.ones(len(x), dtype=torch.bool, device=x.device)
        if mask is not None and mask.numel() == len(x):
            counts = mask.flatten().bool().to(x.device)
        weight = _importance(y, counts, tokens)
        for index, sums in enumerate(self.folds):
            chosen = counts & (fold == index)
            sums.add(x[chosen], y[chosen], guess[chosen], weight[chosen])

    def _features_of(self, output: Tensor) -> Tensor | None:
        """Return the features that the linear layer has mapped to this output; a student may be called for other reasons."""
        while self._calls:
            features, mapped = self._calls.pop(0)
            if mapped.numel() == output.numel() and torch.equal(mapped.flatten(), output.flatten()):
                return features
        return None

    def sums(self) -> list[Tensor]:
        return [part for sums in self.folds for part in sums.all()]

    def fit(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], float, float]:
        folds, self.folds = [sums for sums in self.folds if sums.count], []
        has_bias = self.linear.bias is not None
        self._require_tokens([int(sums.count.item()) for sums in folds], has_bias)
        left = [0.0] * len(self.strengths)
        for held_out in folds:
            others = RegressionSums.joined([sums for sums in folds if sums is not held_out])
            for index, change in enumerate(others.changes(self.strengths, has_bias)):
                left[index] += held_out.error(*change)
        total = RegressionSums.joined(folds)
        before, after = total.missed.item(), min(left, default=math.inf)
        moved: dict[str, Tensor] = {}
        if after < before:
            ((weight, bias),) = total.changes((self.strengths[left.index(after)],), has_bias)
            moved = {"weight": weight.T} | ({"bias": bias} if has_bias else {})
        named = {f"{self.name}.{part}".lstrip("."): value for part, value in moved.items()}
        values = {name: (parameters[name].to(value) + value).to(parameters[name]) for name, value in named.items()}
        size = total.square.item() or 1.0
        return values, (before / size) ** 0.5, (min(before, after) / size) ** 0.5

    def _require_tokens(self, counts: list[int], has_bias: bool) -> None:
        unknowns = self.linear.in_features + has_bias
        fitted = sum(counts) - max(counts, default=0)
        if fitted >= unknowns:
            return
        raise DataError(
            f"calibrate() has too few tokens for site {self.site.name!r}.",
            f"Each output has {unknowns} unknowns; of {sum(counts)} tokens {fitted} are left to fit when a sample is held out.",
            f"give {2 * unknowns} tokens or more, in several samples. Nothing was changed.",
        )


def _importance(teacher: Tensor, counts: Tensor, tokens: int) -> Tensor:
    """Return weights (n,) that make errors relative to the teacher's output at the token, or in its sample if that is more.

    A few tokens have outputs many times larger than the rest, often the first; unweighted, they alone would be fitted.
    """
    square = teacher.to(torch.promote_types(teacher.dtype, torch.float32)).square().sum(1)
    shown = torch.where(counts, square, 0.0).view(-1, tokens)
    mean = shown.sum(1) / counts.view(-1, tokens).sum(1).clamp_min(1)
    return torch.maximum(square, mean.repeat_interleave(tokens)).clamp_min(torch.finfo(square.dtype).tiny).reciprocal()
