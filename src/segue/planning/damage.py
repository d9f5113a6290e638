"""Damage: how far the logits go from the original's when students take over, near the original and for real subsets.

With z the weights of the students, KL(original || blend) and its slope are 0 at z = 0. The first term that says anything is
1/2 z' H z with H = E[J' F J]: J = d logits / d z, one forward-mode product for each option, and F = diag(p) - p p', the Fisher
matrix of the softmax. So one pass for each option gives all pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from segue.core.backbone import evaluating
from segue.core.blending import blendable, call_arguments, calling, captured_outputs, merge, padding_mask
from segue.errors import PlanError
from segue.planning.candidates import Candidates, Option, logits_of
from segue.students.attention.cache_copy import copy_caches
from segue.students.layers import layers_of

MOST_BYTES = 2**29  # of the products of all options at once; more predictions are sampled


class Divergence(NamedTuple):
    """Sums over the predictions of a batch."""

    kl: float
    differing: float  # predictions whose first choice is not the original's
    predictions: int


def predictions(model: nn.Module, batch: Any) -> int:
    """Count the predictions for a batch: one for each token of a language model, one for each example of a classifier."""
    with evaluating(model), torch.no_grad(), calling("batch"):
        return max(1, len(counted(logits(model, batch), padding_mask(batch))))


def require_logits(model: nn.Module, batches: Sequence[Any]) -> None:
    """Refuse a model without logits, whose forward is random, or whose logits for one of the batches are not finite."""
    for i, batch in enumerate(batches):
        with evaluating(model), torch.no_grad(), calling("batch"):
            first = logits(model, batch)
            second = logits(model, batch) if i == 0 else first
        if not bool(first.isfinite().all()):
            raise PlanError(
                "the model must return finite logits.",
                f"Some are inf or NaN for the batch at position {i}.",
                "give other batches. Nothing was changed.",
            )
        if not torch.equal(first, second):
            raise PlanError(
                "the model must return the same logits for the same batch.",
                f"Two forwards in evaluation differ by up to {(first - second).abs().max().item():.3g}: its forward is random.",
                "switch sampling and noise off. Nothing was changed.",
            )


def divergences(
    candidates: Candidates, batch: Any, mask: Tensor | None, subsets: Sequence[Sequence[Option]]
) -> list[Divergence]:
    """Measure the damage of subsets of students on a batch, by forwards alone."""
    with candidates.showing(()) as model, calling("batch"):
        before = counted(logits(model, batch), mask).log_softmax(-1)
    found = []
    for subset in subsets:
        with candidates.showing(subset) as model:
            after = counted(logits(model, batch), mask).log_softmax(-1)
        if not bool(after.isfinite().all()):
            raise PlanError(
                "the students must return finite logits.",
                f"Some are inf or NaN with {', '.join(' at '.join(option[::-1]) for option in subset)}.",
                "give other batches to fit on, or a smaller lr. Nothing was changed.",
            )
        kl = F.kl_div(after, before, reduction="none", log_target=True).sum(-1)
        differing = (before.argmax(-1) != after.argmax(-1)).sum()
        found.append(Divergence(float(kl.double().sum()), float(differing), len(before)))
    return found


def curvature(candidates: Candidates, batch: Any, mask: Tensor | None, seed: int = 0) -> Tensor:
    """Return H of all options on a batch, (options, options); raises where an operator has no forward-mode derivative."""
    count = len(candidates.options)
    rows: list[Tensor] = []
    chosen: Tensor | None = None
    for option in candidates.options:
        values, product = (counted(x, mask) for x in product_of(candidates, option, batch))
        if chosen is None:
            most = max(1, MOST_BYTES // (4 * count * values.shape[-1]))
            generator = torch.Generator().manual_seed(seed)
            chosen = torch.randperm(len(values), generator=generator)[:most].to(values.device)
        shares, product = values[chosen].softmax(-1), product[chosen]
        centred = product - (shares * product).sum(-1, keepdim=True)
        rows.append((centred * shares.sqrt()).flatten())
    assert chosen is not None
    stacked = torch.stack(rows)
    return (stacked @ stacked.T).double().cpu() / len(chosen)


def product_of(candidates: Candidates, option: Option, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the original's logits, and d logits / d z for the weight z of one student, at z = 0."""
    seam, student = candidates.handover.seams[option[0]], candidates.students[option]
    layers = layers_of(seam.require_teacher())
    outputs: list[Any] = []

    def before(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = tree_map_only(Tensor, _primal, copy_caches(args, kwargs))
        with captured_outputs():
            outputs.append(student(*args, **kwargs))

    def after(_layer: nn.Module, _args: Any, output: Any) -> Any:
        return merge(output, outputs.pop(), _towards, seam.site)

    handles = [layers[0].register_forward_pre_hook(before, with_kwargs=True), layers[-1].register_forward_hook(after)]
    try:  # the fused attention of torch has no forward-mode derivative
        with candidates.showing(()) as model, forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
            primal, product = _unpacked(logits(model, batch))
            return primal.clone(), torch.zeros_like(primal) if product is None else product.clone()
    finally:
        for handle in handles:
            handle.remove()


def _unpacked(x: Tensor) -> tuple[Tensor, Tensor | None]:
    value, derivative = forward_ad.unpack_dual(x)  # type: ignore[no-untyped-call]
    return value, derivative


def _primal(x: Tensor) -> Tensor:
    return _unpacked(x)[0]


def _towards(teacher: Tensor, student: Tensor) -> Tensor:
    """Return the teacher's output with the direction to the student's."""
    if not blendable(teacher):
        return teacher
    here, so_far = _unpacked(teacher)
    direction = _primal(student).to(here.dtype) - here
    direction = direction if so_far is None else direction + so_far  # a shared module is called again
    dual: Tensor = forward_ad.make_dual(here, direction)  # type: ignore[no-untyped-call]
    return dual


def logits(model: nn.Module, batch: Any) -> Tensor:
    """Return the logits of a model for a batch, in float32."""
    args, kwargs = call_arguments(batch)
    output = model(*args, **kwargs)
    found = logits_of(output)
    if found is None:
        raise PlanError(
            "the model must return logits.",
            f"It returns {type(output).__name__}, without a floating tensor of logits.",
            "load it with its head, such as AutoModelForCausalLM or a classifier. Nothing was changed.",
        )
    return found.float()


def counted(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the predictions that count, (predictions, classes)."""
    if mask is not None and mask.shape == values.shape[:-1]:
        return values[mask.bool().to(values.device)]
    return values.flatten(0, -2)


def pairs_of(options: Sequence[Option]) -> list[tuple[Option, Option]]:
    """Return all pairs of options at different sites."""
    return [(a, b) for i, a in enumerate(options) for b in options[i + 1 :] if a[0] != b[0]]


def swaps(options: Sequence[Option]) -> list[tuple[Option, ...]]:
    """Return all options alone, and all pairs of them at different sites."""
    return [*((option,) for option in options), *pairs_of(options)]


def from_swaps(options: Sequence[Option], measured: dict[tuple[Option, ...], float]) -> Tensor:
    """Return the matrix that single swaps and pairs of them explain exactly, where there is no forward-mode product."""
    place = {option: i for i, option in enumerate(options)}
    matrix = torch.zeros(len(options), len(options), dtype=torch.float64)
    for option, i in place.items():
        matrix[i, i] = 2 * measured[option,]
    for a, b in pairs_of(options):
        matrix[place[a], place[b]] = matrix[place[b], place[a]] = measured[a, b] - measured[a,] - measured[b,]
    return matrix


def random_subsets(options: Sequence[Option], count: int, seed: int) -> list[tuple[Option, ...]]:
    """Draw distinct subsets of two sites or more, each number of sites equally often, a random candidate at each of them."""
    at: dict[str, list[Option]] = {}
    for option in options:
        at.setdefault(option[0], []).append(option)
    possible = math.prod(len(here) + 1 for here in at.values()) - 1 - len(options)
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    found: dict[tuple[Option, ...], None] = {}
    sites, size = list(at), 1
    for _ in range(100 * count):
        if len(found) >= min(count, possible):
            break
        size = size + 1 if size < len(sites) else 2
        chosen = sorted(torch.randperm(len(sites), generator=generator)[:size].tolist())
        found[tuple(at[sites[i]][draw(len(at[sites[i]]))] for i in chosen)] = None
    return list(found)
