"""Least squares: the output projection that comes nearest to the teacher's outputs on a few batches, in closed form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from segue.errors import StudentError
from segue.sites import Site


@dataclass(frozen=True, kw_only=True)
class LeastSquares:
    """Fit the student's last linear map by ridge regression; see `handover.calibrate`.

    `ridge` is relative to the mean square of the features. `output` names the map inside students that do not say themselves
    which one is their last.
    """

    ridge: float = 1e-4
    output: str | None = None

    def projection(self, student: nn.Module, site: Site) -> nn.Linear:
        """Find the linear map to fit."""
        if self.output is None:
            found = getattr(student, "output_projection", student)
        else:
            found = dict(student.named_modules()).get(self.output)
        if not isinstance(found, nn.Linear):
            raise StudentError(
                f"LeastSquares() was to fit the output projection of the student at site {site.name!r}.",
                f"{type(student).__name__} does not say which it is; its linear maps are {_linear_maps(student)}."
                if self.output is None
                else f"{type(student).__name__} has no linear map {self.output!r}, but {_linear_maps(student)}.",
                "name its last linear map: LeastSquares(output='proj'). Where the output projection lies outside the site, "
                "as behind BERT's attention.self, there is none to fit. Nothing was changed.",
            )
        return found


class Sums:
    """What a ridge regression of targets on features needs to keep: five sums over tokens."""

    def __init__(self, features: int, targets: int, device: torch.device) -> None:
        place = torch.device("cpu") if device.type == "mps" else device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=place)

        self.count, self.square, self.missed = zeros(), zeros(), zeros()
        self.of_features, self.of_targets = zeros(features), zeros(targets)
        self.gram, self.cross = zeros(features, features), zeros(features, targets)

    def add(self, x: Tensor, y: Tensor, guess: Tensor) -> None:
        """Add tokens: features (n, f), targets (n, t), and what the student answers before the fit."""
        x, y, guess = (part.to(self.gram) for part in (x, y, guess))
        self.count += len(x)
        self.of_features += x.sum(0)
        self.of_targets += y.sum(0)
        self.gram += x.T @ x
        self.cross += x.T @ y
        self.square += y.square().sum()
        self.missed += (y - guess).square().sum()

    def all(self) -> list[Tensor]:
        return [self.count, self.square, self.of_features, self.of_targets, self.gram, self.cross, self.missed]

    def solve(self, ridge: float, with_bias: bool) -> tuple[Tensor, Tensor | None, float]:
        """Return weight (targets, features), bias and the squared error that is left."""
        x, y = self.of_features / self.count, self.of_targets / self.count
        gram, cross = self.gram, self.cross
        if with_bias:
            gram, cross = gram - self.count * torch.outer(x, x), cross - self.count * torch.outer(x, y)
        penalty = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        weight = torch.linalg.lstsq(gram + penalty, cross, driver="gelsd" if gram.device.type == "cpu" else None).solution
        total = self.square - (self.count * y.square().sum() if with_bias else 0.0)
        left = total - 2 * (weight * cross).sum() + (weight * (gram @ weight)).sum()
        return weight.T, y - weight.T @ x if with_bias else None, max(0.0, left.item())


def _linear_maps(student: nn.Module) -> str:
    return ", ".join(name for name, part in student.named_modules() if isinstance(part, nn.Linear)) or "none"
