"""Kinds of parameters: which of a student's are its teacher's, and which are new."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

ROUNDING = 1e-12  # of a sum in float64, relative


@torch.no_grad()
def copied_parameters(student: nn.Module, teacher: nn.Module) -> set[str]:
    """Return the names of a student's parameters whose values are the teacher's: all of a tensor, rows or columns of it.

    >>> from torch import nn
    >>> teacher = nn.Linear(4, 6)
    >>> student = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 6))
    >>> _ = student[0].weight.data.copy_(teacher.weight[::3])
    >>> copied_parameters(student, teacher)
    {'0.weight'}

    A tensor of one value (zeros, ones) says nothing of where it comes from and counts as new.
    """
    known: dict[int, list[Tensor]] = {}  # by length of a row: a number for each row
    for tensor in teacher.parameters():
        for rows in _rows(tensor):
            known.setdefault(rows.shape[-1], []).append(_sums(rows))
    found = set()
    for name, parameter in student.named_parameters():
        if parameter.is_meta or parameter.numel() < 2 or (parameter == parameter.flatten()[0]).all():
            continue
        rows = next(_rows(parameter))
        if any(_all_among(_sums(rows), sums) for sums in known.get(rows.shape[-1], ())):
            found.add(name)
    return found


def _rows(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor as a matrix, and its transpose; a vector is a column of single numbers."""
    if tensor.is_meta or not tensor.is_floating_point() or tensor.numel() == 0:
        return
    if tensor.dim() < 2:
        yield tensor.reshape(-1, 1)
        return
    matrix = tensor.flatten(1)
    yield matrix
    yield matrix.T


def _sums(rows: Tensor) -> Tensor:
    """Return a number for each row that equal rows have in common up to rounding, and others do not."""
    factors = torch.rand(rows.shape[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    return (rows.detach().cpu().double() * factors).sum(-1)


def _all_among(sums: Tensor, known: Tensor) -> bool:
    ordered = known.sort().values
    after = torch.searchsorted(ordered, sums).clamp(max=len(ordered) - 1)
    distance = torch.minimum((ordered[after] - sums).abs(), (ordered[(after - 1).clamp(min=0)] - sums).abs())
    return bool((distance <= ROUNDING * sums.abs()).all())
