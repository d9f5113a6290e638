"""What calls of a module say about its hidden layer, with random weights and the arguments that such modules take."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from segue.students.hidden_layer.units import Hidden, is_map, join, matrix, owner_of, with_units
from segue.students.layers import clone

Call: TypeAlias = tuple[Any, ...]


@torch.no_grad()
def randomised(module: nn.Module) -> nn.Module:
    """Copy a module with random weights, in float32, so that no unit happens to be idle."""
    generator = torch.Generator().manual_seed(0)
    probe = clone(module).float()
    probe.eval()
    for parameter in probe.parameters():
        spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
        parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    return probe


def own_calls(probe: nn.Module, hidden: Hidden) -> list[Call] | str:
    """Return the arguments that the module takes, or what it raises."""
    taken: list[Call] = []
    refused = ""
    for shapes in (_shapes(probe, hidden), _shapes_across_tokens(probe, hidden)):
        for call in () if taken else _calls(probe, hidden, shapes):
            try:
                outputs = outputs_of(probe, [call])
                problem = "" if outputs and all(x.isfinite().all() for x in outputs) else "returns no finite tensor"
            except Exception as error:  # whatever it raises, it is not called like this
                problem = f"raises {_first_line(error)}"
            if not problem:
                taken.append(call)
            elif not refused:
                refused = f"called with {_described(call)} it {problem}"
    return taken or refused


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]:.120}" if lines else type(error).__name__


def _calls(probe: nn.Module, hidden: Hidden, shapes: list[tuple[int, ...]]) -> Iterator[Call]:
    """Yield the calls that MLPs are known to take: tokens or pixels, then a residual, an image's size, or chosen experts."""
    generator, device = torch.Generator().manual_seed(1), _first_weight(probe, hidden).device
    parameters = inspect.signature(probe.forward).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    others = sum(p.default is p.empty for p in positional) - 1

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    for shape in shapes:
        x = random(*shape)
        if hidden.experts and len(positional) >= 3:
            if len(shape) == 2:
                first = torch.arange(len(x), device=device) % hidden.experts
                yield x, torch.stack([first, (first + 1) % hidden.experts], dim=1), random(len(x), 2).abs()
            continue
        yield (x, *(random(*shape) for _ in range(others)))
        if others > 0:
            yield (x, *[None] * others)
        if others == 1:  # the size of an image, or a mask
            yield x, (2, shape[1] // 2)
            yield x, torch.ones(1, 1, shape[1], shape[1], device=device)
        if others == 2:
            yield x, 2, shape[1] // 2


def _first_weight(probe: nn.Module, hidden: Hidden) -> Tensor:
    return probe.get_parameter(hidden.axes[0].name)


def _width(probe: nn.Module, hidden: Hidden) -> int:
    return _first_weight(probe, hidden).shape[(3 if hidden.experts else 1) - hidden.axes[0].dim]


def _shapes(probe: nn.Module, hidden: Hidden) -> list[tuple[int, ...]]:
    """Return the shapes of inputs to try: tokens, pixels, channels last or first."""
    width, tokens = _width(probe, hidden), 2 * (hidden.experts or 3)  # which experts may divide among them
    shapes = [(1, tokens, width), (1, 2, tokens // 2, width), (tokens, width), (1, width, 2, tokens // 2), (1, width, tokens)]
    return shapes[::-1] if _first_weight(probe, hidden).dim() > 2 and not hidden.experts else shapes


def _shapes_across_tokens(probe: nn.Module, hidden: Hidden) -> list[tuple[int, ...]]:
    """Return a shape for a module with one other layer, which mixes as many tokens as it has weights for."""
    fixed = [matrix(part).weight.shape[1] for name, part in probe.named_modules() if is_map(part) and name not in hidden.maps]
    return [(1, fixed[0], _width(probe, hidden))] if len(fixed) == 1 else []


def _described(call: Call) -> str:
    return ", ".join(f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x) for x in call)


@torch.no_grad()
def outputs_of(module: nn.Module, calls: list[Call]) -> list[Tensor]:
    """Return every floating tensor that the module returns in these calls."""
    outputs = []
    for call in calls:
        result = module(*(x.clone() if isinstance(x, Tensor) else x for x in call))
        parts = result if isinstance(result, tuple | list) else (result,)
        outputs += [part.float() for part in parts if isinstance(part, Tensor) and part.is_floating_point()]
    return outputs


def _same(before: list[Tensor], after: list[Tensor]) -> bool:
    alike = [x.shape for x in before] == [x.shape for x in after]
    return alike and all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(before, after, strict=True))


def preserves(teacher: nn.Module, hidden: Hidden, units: Tensor) -> bool:
    """Verify that an MLP whose hidden units are repeated like this returns what it returned before."""
    probe = randomised(teacher)
    calls = own_calls(probe, hidden)
    assert not isinstance(calls, str)
    return _same(outputs_of(probe, calls), outputs_of(with_units(probe, hidden, units), calls))


@torch.no_grad()
def changes_when_doubled(probe: nn.Module, hidden: Hidden, calls: list[Call]) -> str:
    """Say how the output changes when every hidden unit is doubled; nothing where it is the same."""
    before = outputs_of(probe, calls)
    try:
        twice = with_units(probe, hidden, torch.arange(2 * hidden.size) % hidden.size)
        after = outputs_of(twice, calls)
    except Exception as error:  # whatever it raises, this is not its hidden layer
        return f"with twice the units between {hidden} it raises {_first_line(error)}"
    if not _same(before, after):
        return f"with every unit between {hidden} twice it returns something else"
    _silence_(twice, hidden)
    if _same(before, outputs_of(twice, calls)):
        return f"its output does not depend on the units between {hidden}"
    return ""


@torch.no_grad()
def _silence_(module: nn.Module, hidden: Hidden) -> nn.Module:
    """Set to zero what leaves the hidden layer."""
    owner, key = owner_of(module, hidden.axes[-1].name)
    getattr(owner, key).zero_()
    return module


@torch.no_grad()
def lacks_activation(probe: nn.Module, hidden: Hidden, calls: list[Call]) -> str:
    """Say that nothing nonlinear is between two layers: they are a factorised layer, or the values of an attention."""
    if hidden.gated:
        return ""
    bare = clone(probe)
    for name in hidden.inner:
        bare.set_submodule(name, nn.Identity())  # a norm is not an activation
    before = outputs_of(bare, calls)
    for factor in (-1.0, 3.0):
        scaled = clone(bare)
        for axis in hidden.axes:
            owner, key = owner_of(scaled, axis.name)
            if not isinstance(owner, nn.Identity):
                getattr(owner, key).mul_(1 / factor if axis is hidden.axes[-1] else factor)
        if not _same(before, outputs_of(scaled, calls)):
            return ""
    return f"nothing nonlinear is between {hidden}"


@torch.no_grad()
def activation_of(teacher: nn.Module, hidden: Hidden) -> str | None:
    """Find the activation by what it does: without it the hidden layer is linear, and all else is the same."""
    probe = randomised(teacher)
    calls = own_calls(probe, hidden)
    assert not isinstance(calls, str)
    rest = outputs_of(_silence_(clone(probe), hidden), calls)
    for name in _activations(probe):
        leave_out_(linear := clone(probe), name)
        try:
            same = _same(rest, outputs_of(_silence_(clone(linear), hidden), calls))
            if same and lacks_activation(linear, hidden, calls):
                return name
        except Exception:  # it is needed for something else
            continue
    return None


def leave_out_(module: nn.Module, activation: str) -> None:
    """Replace an activation by the identity."""
    owner, key = owner_of(module, activation)
    setattr(owner, key, nn.Identity())
    if isinstance(owner, nn.TransformerEncoderLayer):
        owner.activation_relu_or_gelu = 0  # or its fused kernel computes it all the same


def _activations(module: nn.Module) -> Iterator[str]:
    """Yield the names of modules without weights, then those of functions that modules keep as attributes."""
    for name, part in module.named_modules():
        if name and not any(True for _ in part.children()) and not part.state_dict() and not isinstance(part, nn.Dropout):
            yield name
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if callable(value) and not key.startswith("_"):
                yield join(name, key)
