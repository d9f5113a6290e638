"""What the diagnostics are compared with: models put together by hand, plain autograd, and sums written out.

Nothing of a seam is used here. A hand-built model is a copy of the original in which plain assignment has placed, at every
site, the teacher, the student, or a blend of the two.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import segue
from segue.lab.small_vit import VisionTransformer
from tests.helpers import models

Loss = Callable[[nn.Module, Any], Tensor]
SITES = "blocks.*.attn"


class ByHand(nn.Module):
    """The teacher at weight 0, the student at weight 1, in between a blend of all floating tensors that they return."""

    def __init__(self, teacher: nn.Module, student: nn.Module, weight: float, teacher_gradient: bool) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student
        self.weight = weight
        self.teacher_gradient = teacher_gradient

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.weight == 1.0:
            return self.student(*args, **kwargs)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.teacher_gradient):
            teacher = self.teacher(*args, **kwargs)
        return teacher if self.weight == 0.0 else self._between(teacher, self.student(*args, **kwargs))

    def _between(self, teacher: Any, student: Any) -> Any:
        if isinstance(teacher, tuple):
            return tuple(map(self._between, teacher, student))
        if isinstance(teacher, Tensor) and teacher.is_floating_point():
            return (1.0 - self.weight) * teacher + self.weight * student
        return student


class Fixed(nn.Module):
    """Return what was given at the start, whatever comes in; the rest of a tuple is the module's own."""

    def __init__(self, module: nn.Module, y: Tensor) -> None:
        super().__init__()
        self.module, self.y = module, y

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.module(*args, **kwargs)
        return (self.y, *output[1:]) if isinstance(output, tuple) else self.y


@dataclass
class Reference:
    """An untouched model, the handover that was begun in a copy of it, and minibatches."""

    original: nn.Module
    handover: segue.Handover
    batches: list[Any]
    loss: Loss
    _built: tuple[nn.Module, dict[str, nn.Module]] | None = None

    @property
    def sites(self) -> list[str]:
        return list(self.handover.seams)

    def model(self, weights: Mapping[str, float]) -> tuple[nn.Module, dict[str, nn.Module]]:
        """Put a model together with these weights of the students; return it with the students' copies."""
        model = copy.deepcopy(self.original).requires_grad_(False).eval()
        students = {}
        for name, weight in weights.items():
            student = students[name] = copy.deepcopy(self.handover.seams[name].student).eval().requires_grad_(True)
            teacher = model.get_submodule(name)
            place(model, name, ByHand(teacher, student, weight, bool(self.handover.plan.teacher_gradient)))
        return model, students

    def at(self, weights: Mapping[str, float]) -> tuple[nn.Module, dict[str, nn.Module]]:
        """Return such a model, put together once and given other weights each time."""
        if self._built is None:
            self._built = self.model(weights)
        for name, weight in weights.items():
            self._built[0].get_submodule(name).weight = weight
        return self._built

    def loss_at(self, weights: Mapping[str, float], index: int) -> float:
        """Return the loss on one minibatch."""
        with torch.no_grad():
            return self.loss(self.at(weights)[0], self.batches[index]).item()

    def gradients(self, weights: Mapping[str, float], index: int) -> dict[str, np.ndarray]:
        """Return the gradient of every student on one minibatch, as one vector each."""
        model, students = self.at(weights)
        parameters = {name: list(student.parameters()) for name, student in students.items()}
        loss = self.loss(model, self.batches[index])
        if not loss.requires_grad:
            return {name: np.zeros(sum(p.numel() for p in own)) for name, own in parameters.items()}
        flat = [p for own in parameters.values() for p in own]
        taken = iter(torch.autograd.grad(loss, flat, allow_unused=True))
        return {name: np.concatenate([_flat(next(taken), p) for p in own]) for name, own in parameters.items()}

    def slopes(self, site: str, weight: float, means: Mapping[str, float]) -> np.ndarray:
        """Return the paper's a on every minibatch: the gradient per unit of the weight, the other gates at their means."""
        weights = {**dict.fromkeys(self.sites, 0.0), **means, site: weight}
        return np.stack([self.gradients(weights, i)[site] for i in range(len(self.batches))]) / weight

    def tail(self, site: str, weights: Mapping[str, float], index: int) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
        """Return the loss by the output of one site, and what teacher and student return there."""
        model, students = self.model(weights)
        model.requires_grad_(False)
        for module in model.modules():  # the derivatives of the loss itself, whatever training lets through
            if isinstance(module, ByHand):
                module.teacher_gradient = True
        seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        by_hand = model.get_submodule(site)
        hook = by_hand.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
        with torch.no_grad():
            self.loss(model, self.batches[index])
            hook.remove()
            ((args, kwargs),) = seen
            outputs = [side(*args, **kwargs) for side in (by_hand.teacher, students[site])]
        teacher, student = (output[0] if isinstance(output, tuple) else output for output in outputs)

        def psi(y: Tensor) -> Tensor:
            place(model, site, Fixed(by_hand, y))
            return self.loss(model, self.batches[index])

        return psi, teacher, student


def place(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _flat(gradient: Tensor | None, parameter: Tensor) -> np.ndarray:
    return (torch.zeros_like(parameter) if gradient is None else gradient).detach().double().reshape(-1).numpy()


def variance(vectors: Sequence[np.ndarray], chances: Sequence[float] | None = None) -> float:
    """Return E|g - E g|^2 over a finite population of vectors."""
    stacked = np.stack(vectors)
    chances = np.full(len(stacked), 1.0 / len(stacked)) if chances is None else np.asarray(chances)
    mean = (chances[:, None] * stacked).sum(0)
    return float((chances * ((stacked - mean) ** 2).sum(1)).sum())


def square(vectors: np.ndarray) -> float:
    """Return E|a|^2."""
    return float((vectors**2).sum(1).mean())


def combinations(outcomes: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[tuple[dict[str, float], float]]:
    """Yield all that independent gates can do together, with the probability."""
    for chosen in itertools.product(*outcomes.values()):
        yield {n: w for n, (w, _) in zip(outcomes, chosen, strict=True)}, math.prod(chance for _, chance in chosen)


def parts(reference: Reference, outcomes: Mapping[str, Sequence[tuple[float, float]]], site: str) -> tuple[float, float, float]:
    """Return E[Var(g | X)], Var(E[g | X]) and Var[g] of one site's gradient, by a loop over all outcomes and minibatches."""
    every = list(combinations(outcomes))
    count = len(reference.batches)
    chances = [chance for _, chance in every]
    found = [[reference.gradients(weights, i)[site] for weights, _ in every] for i in range(count)]
    means = [sum(c * g for c, g in zip(chances, row, strict=True)) for row in found]
    whole = variance([g for row in found for g in row], [c / count for _ in found for c in chances])
    return sum(variance(row, chances) for row in found) / count, variance(means), whole


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy in the precision of the model."""
    *inputs, labels = batch
    return F.cross_entropy(model(*inputs), labels)


def begin(
    original: nn.Module, batches: list[Any], loss: Loss = cross_entropy, *, alpha: float = 0.5, **settings: Any
) -> Reference:
    """Begin a handover in a copy of a model."""
    plan = segue.Plan(**{"sites": SITES, "schedule": segue.schedules.Constant(alpha=alpha), **settings})
    handover = segue.replace_(copy.deepcopy(original).train(), plan, total_steps=20)
    return Reference(original, handover, batches, loss)


def vit(depth: int = 2, width: int = 8, batches: int = 3, **settings: Any) -> Reference:
    """A tiny vision transformer in double precision."""
    original = models.build(lambda: VisionTransformer(depth=depth, width=width, heads=2, patch=4, classes=3)).double()
    return begin(original, [images(seed, (2, 1, 8, 8), 3) for seed in range(batches)], **settings)


def timm_vit(**settings: Any) -> Reference:
    """timm's smallest in double precision."""
    original = models.build(lambda: timm.create_model("test_vit", img_size=32, num_classes=3)).double()
    return begin(original, [images(seed, (2, 3, 32, 32), 3) for seed in range(2)], **{"sites": "blocks.{0,2}.attn", **settings})


def bert(**settings: Any) -> Reference:
    """A tiny BERT in double precision, on padded sentences."""
    original = models.build(models.bert).double()

    def batch(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(models.VOCABULARY, (3, models.TOKENS), generator=generator)
        return {"input_ids": ids, "attention_mask": models.padding(), "labels": torch.arange(3)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return F.cross_entropy(model(**inputs).logits, batch["labels"])

    sites = {"sites": "bert.encoder.layer.*.attention.self"}
    return begin(original, [batch(seed) for seed in range(2)], loss, **{**sites, **settings})


def images(seed: int, shape: tuple[int, ...], classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(classes, (shape[0],), generator=generator)


class Narrow(nn.Module):
    """One site between two layers: x -> site(x) -> a loss of the test's choosing. Small enough for whole Hessians."""

    def __init__(self, inside: int = 3, outside: int = 4) -> None:
        super().__init__()
        self.before = nn.Linear(2, inside)
        self.site = nn.Linear(inside, outside)

    def forward(self, x: Tensor) -> Tensor:
        return self.site(self.before(x))


def narrow(loss: Callable[[Tensor, Tensor], Tensor], batches: int = 2, **settings: Any) -> Reference:
    """A handover at the last layer of a tiny model whose loss is a plain function of that layer's output."""
    original = models.build(Narrow).double()
    generator = torch.Generator().manual_seed(3)
    made = [
        (torch.randn(2, 2, generator=generator, dtype=torch.float64), torch.randn(2, 4, generator=generator).double())
        for _ in range(batches)
    ]
    return begin(original, made, lambda model, batch: loss(model(batch[0]), batch[1]), **{"sites": "site", **settings})


class ThreeWeights:
    """A soft gate that says its law: a tenth, the mean, or more, so that the mean is 1 - alpha."""

    def __call__(self, alpha: float, noise: Any) -> float:
        if noise is None:
            return 1.0 - alpha
        drawn, reached = noise.uniform(), 0.0
        for weight, chance in self.outcomes(alpha):
            reached += chance
            if drawn < reached:
                return weight
        return weight

    def outcomes(self, alpha: float) -> tuple[tuple[float, float], ...]:
        p = 1.0 - alpha
        return ((0.1 * p, 0.25), (p, 0.25), (1.45 * p, 0.5)) if p <= 0.6 else ((p, 1.0),)


class Silent:
    """A gate that does not say its law: uniform between 0 and twice the mean."""

    def __call__(self, alpha: float, noise: Any) -> float:
        return min(1.0, (1.0 - alpha) * (1.0 if noise is None else 2.0 * noise.uniform()))
