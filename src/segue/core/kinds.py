"""Kinds of parameters: which of a student's are its teacher's, and which are new."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from segue.core.tensor_files import full

ROUNDING = 1e-12  # of a sum in float64, relative to the sum of the sizes
RUN = 8  # numbers of a vector that are compared together: the values of bfloat16 are few, and single ones are in any vector
CHUNK = 1 << 17  # numbers that are converted to float64 at a time

Sums = tuple[Tensor, Tensor]  # of the numbers in each row, and of their sizes


@torch.no_grad()
def copied_parameters(student: nn.Module, teacher: nn.Module) -> set[str]:
    """Return the names of a student's parameters whose values are the teacher's: all of a tensor, rows or columns of it.

    >>> from torch import nn
    >>> teacher = nn.Linear(4, 6)
    >>> student = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 6))
    >>> _ = student[0].weight.data.copy_(teacher.weight[::3])
    >>> copied_parameters(student, teacher)
    {'0.weight'}

    Of a vector, runs are the teacher's. A tensor of one value (zeros, ones) says nothing of where it comes from and counts as
    new, and so do integers.
    """
    teachers = [_matrix(tensor) for tensor in teacher.parameters() if _has_values(tensor)]
    known: dict[int, list[Sums]] = {}  # by length of a row
    found = set()
    for name, parameter in student.named_parameters():
        if not _has_values(parameter):
            continue
        matrix = _matrix(parameter)
        if matrix.numel() < 2 or bool((matrix == matrix[0, 0]).all()):
            continue
        rows = _runs(matrix, matrix.numel()) if 1 in matrix.shape else matrix
        length = rows.shape[-1]
        if length not in known:
            known[length] = [sums for tensor in teachers for sums in _sums_of_length(tensor, length)]
        if known[length] and any(_all_among(_sums(rows), sums) for sums in known[length]):
            found.add(name)
    return found


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 0


def _matrix(tensor: Tensor) -> Tensor:
    """Return a tensor as a matrix of real numbers, whole in this process; a vector is one row."""
    whole = full(tensor.detach())
    whole = torch.view_as_real(whole.resolve_conj()) if whole.is_complex() else whole
    return whole.flatten(1) if whole.dim() > 1 else whole.reshape(1, -1)


def _runs(vector: Tensor, of: int) -> Tensor:
    """Cut a vector of a student into runs of numbers, each of which a teacher's vector must have."""
    return vector.reshape(-1, of if of % RUN else RUN)


def _sums_of_length(matrix: Tensor, length: int) -> list[Sums]:
    """Return the sums of a teacher's rows, of its columns, and of all runs of a vector, if they have this length."""
    if 1 in matrix.shape:
        return [_sums(matrix.flatten().unfold(0, length, 1))] if length <= matrix.numel() else []
    rows, columns = matrix.shape
    return [*([_sums(matrix)] if columns == length else []), *([_sums(matrix, columns=True)] if rows == length else [])]


def _sums(matrix: Tensor, *, columns: bool = False) -> Sums:
    """Return a number for each row, or column, that equal ones have in common up to rounding, and others do not."""
    length = matrix.shape[0 if columns else 1]
    factors = torch.rand(length, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    step = max(1, CHUNK // matrix.shape[1])
    parts = ((chunk.to("cpu", torch.float64, copy=True), place * step) for place, chunk in enumerate(torch.split(matrix, step)))
    if not columns:
        pairs = [(chunk @ factors, chunk.abs_() @ factors) for chunk, _ in parts]
        return torch.cat([total for total, _ in pairs]), torch.cat([size for _, size in pairs])
    total, size = (torch.zeros(matrix.shape[1], dtype=torch.float64) for _ in range(2))
    for chunk, begin in parts:
        own = factors[begin : begin + len(chunk)]
        total += own @ chunk
        size += own @ chunk.abs_()
    return total, size


def _all_among(sums: Sums, known: Sums) -> bool:
    (found, sizes), ordered = sums, known[0].sort().values
    after = torch.searchsorted(ordered, found).clamp(max=len(ordered) - 1)
    distance = torch.minimum((ordered[after] - found).abs(), (ordered[(after - 1).clamp(min=0)] - found).abs())
    return bool((distance <= ROUNDING * sizes).all())
