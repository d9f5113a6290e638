"""MLP students: a narrower, wider or gated hidden layer, in any MLP whose hidden layer can be found and verified."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.border import Fraction, Rule, checked
from segue.errors import StudentError
from segue.sites import Site
from segue.students.attention.spec import Projection
from segue.students.hidden_layer.calls import activation_of, leave_out_, preserves
from segue.students.hidden_layer.search import hidden_layer
from segue.students.hidden_layer.units import Axis, Hidden, matrix, with_units
from segue.students.initialisation import CopyMatching, Initialisation, Kaiming, Net2Net, Original
from segue.students.layers import clone
from segue.students.low_rank import is_linear

__all__ = ["GatedMlp", "NarrowMlp", "WideMlp"]

EXPERT_UNITS = 8  # grouped products of experts need rows of a multiple of 16 bytes, in half precision too


@checked
@dataclass(frozen=True, kw_only=True)
class NarrowMlp:
    """The same MLP with fewer hidden units: the fraction `ratio` of them.

    >>> student = NarrowMlp(ratio=0.5)(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), Site("mlp"))
    >>> student[0]
    Linear(in_features=8, out_features=8, bias=True)

    `CopyMatching` keeps the units with the largest product of the norms of their incoming and outgoing weights.
    """

    ratio: Fraction  # of the hidden units, which stay
    init: Initialisation = field(default_factory=CopyMatching)

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        hidden = hidden_layer(teacher, site, f"NarrowMlp(ratio={self.ratio:.4g})")
        narrowed = with_units(teacher, hidden, _strongest(teacher, hidden, _new_size(self.ratio, hidden)))
        student = clone(narrowed)
        self.init(student, {**_others(narrowed, hidden), **_linear_layers(narrowed, hidden)})
        return student


@checked
@dataclass(frozen=True, kw_only=True)
class WideMlp:
    """The same MLP with `ratio` times as many hidden units; it starts as the teacher's function.

    >>> student = WideMlp(ratio=2)(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), Site("mlp"))
    >>> student[0]
    Linear(in_features=8, out_features=32, bias=True)

    `Net2Net(noise=0.01)` breaks the symmetry between the copies of a unit, which otherwise learn the same.
    """

    ratio: Annotated[
        float, Rule("a number from 1 to 1000", lambda value: 1 <= value <= 1000)
    ]  # the new number of hidden units divided by the old
    init: Initialisation = field(default_factory=Net2Net)

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        hidden = hidden_layer(teacher, site, f"WideMlp(ratio={self.ratio:.4g})")
        units = _repeated(self.ratio, hidden)
        self._check(teacher, hidden, units, site)
        widened = with_units(teacher, hidden, units)
        student = clone(widened)
        linear = {} if hidden.axes[0].interleaved else _linear_layers(teacher, hidden)  # of which `Net2Net` repeats the halves
        self.init(student, {**_others(widened, hidden), **linear})
        return student

    def _check(self, teacher: nn.Module, hidden: Hidden, units: Tensor, site: Site) -> None:
        problem = f"WideMlp(ratio={self.ratio:.4g}) cannot replace the module at site {site.name!r}."
        if isinstance(self.init, Net2Net) and self.init.noise and (hidden.experts or hidden.axes[0].interleaved):
            raise StudentError(
                problem,
                f"It is {type(teacher).__name__}. Net2Net(noise=...) adds noise to linear layers and to halves of them; its "
                f"{hidden.entering[0]} is neither.",
                "use init=Net2Net() without noise. Nothing was changed.",
            )
        if len(hidden.inner) and not preserves(teacher, hidden, units):
            raise StudentError(
                problem,
                f"It is {type(teacher).__name__}, whose {hidden.inner[0]} sees all hidden units at once: repeating some of "
                "them changes its output.",
                f"give a whole number, such as WideMlp(ratio={round(self.ratio + 0.5)}). Nothing was changed.",
            )


@checked
@dataclass(frozen=True, kw_only=True)
class GatedMlp:
    """A gated MLP (SwiGLU) with new weights, `down(silu(gate(x)) * up(x))`, in place of a plain one.

    >>> GatedMlp()(nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8)), Site("mlp")).gate
    Linear(in_features=8, out_features=16, bias=True)

    `ratio` is its hidden width relative to that of a plain MLP; 2/3 needs as many weights. A teacher that is already gated
    keeps its class and activation, and at 2/3 its width.
    """

    ratio: Annotated[float, Rule("a number above 0 and at most 1000", lambda value: 0 < value <= 1000)] = 2 / 3

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        hidden = hidden_layer(teacher, site, f"GatedMlp(ratio={self.ratio:.4g})")
        if hidden.gated:
            student = with_units(teacher, hidden, _repeated(1.5 * self.ratio, hidden))
        elif _is_plain(teacher, hidden):
            student = self._swiglu(teacher, hidden)
        else:
            student = self._gated_inside(teacher, hidden, site)
        new = [""] if isinstance(student, SwiGlu) else [name for name, _ in student.named_modules() if hidden.holds(name)]
        for name in new:
            Kaiming()(student.get_submodule(name), {})
        return student

    def _swiglu(self, teacher: nn.Module, hidden: Hidden) -> nn.Module:
        enter, leave = (matrix(teacher.get_submodule(name)) for name in (*hidden.entering, hidden.leaving))
        student = SwiGlu(enter, leave, _new_size(self.ratio, hidden), *_dropouts(teacher, hidden))
        for name, value in vars(teacher).items():
            plain = isinstance(value, bool | int | float | str) or name == "config"
            if plain and not name.startswith("_") and not hasattr(student, name):
                setattr(student, name, value)
        student.train(teacher.training)
        return student

    def _gated_inside(self, teacher: nn.Module, hidden: Hidden, site: Site) -> nn.Module:
        """Keep the module, which does more than an MLP: gate the layer that enters, and leave its activation out."""
        activation = None if hidden.experts else activation_of(teacher, hidden)
        if activation is None:
            raise StudentError(
                f"GatedMlp(ratio={self.ratio:.4g}) cannot replace the module at site {site.name!r}.",
                f"It is {type(teacher).__name__}, which does more than a plain MLP, and the activation between {hidden} is no "
                "module or attribute that a gate can replace.",
                "NarrowMlp(ratio=...) keeps the activation; or write your own student: fn(teacher, site) -> module. "
                "Nothing was changed.",
            )
        student = with_units(teacher, hidden, _repeated(self.ratio, hidden))
        leave_out_(student, activation)
        student.set_submodule(hidden.entering[0], GatedLayer(student.get_submodule(hidden.entering[0])))
        return student


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x)), with the dropout of the MLP that it replaces."""

    def __init__(self, enter: Projection, leave: Projection, size: int, hidden_dropout: float, dropout: float) -> None:
        super().__init__()
        (weight, bias), out = enter, leave.weight.shape[0]
        where = {"device": weight.device, "dtype": weight.dtype}
        self.gate = nn.Linear(weight.shape[1], size, bias is not None, **where)
        self.up = nn.Linear(weight.shape[1], size, bias is not None, **where)
        self.hidden_dropout = nn.Dropout(hidden_dropout)
        self.down = nn.Linear(size, out, leave.bias is not None, **where)
        self.dropout = nn.Dropout(dropout)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (x,) = (*args, *kwargs.values())  # a model may name it
        y: Tensor = self.dropout(self.down(self.hidden_dropout(F.silu(self.gate(x)) * self.up(x))))
        return y


class GatedLayer(nn.Module):
    """silu(gate(x)) * up(x), in place of a layer that enters a hidden layer and of the activation after it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.gate, self.up = layer, copy.deepcopy(layer)

    @property
    def weight(self) -> Tensor:
        """For code that reads the dtype of a layer's weight."""
        weight = self.gate.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.silu(self.gate(x)) * self.up(x)
        return y


def _linear_layers(teacher: nn.Module, hidden: Hidden) -> dict[str, Original]:
    """Return the linear layers around the hidden layer."""
    return {} if hidden.experts else {name: matrix(teacher.get_submodule(name)) for name in hidden.maps}


def _others(teacher: nn.Module, hidden: Hidden) -> dict[str, Original]:
    """Return the other modules with tensors of their own, such as a norm, or experts whose weights are stacked."""
    holders = ((name, module) for name, module in teacher.named_modules() if hidden.experts or name not in hidden.maps)
    return {name: module for name, module in holders if _own_state(module)}


def _own_state(module: nn.Module) -> bool:
    return any("." not in key for key in module.state_dict())


def _repeated(ratio: float, hidden: Hidden) -> Tensor:
    """Return which units to copy for another number of them, where their weights do not matter."""
    return torch.arange(_new_size(ratio, hidden)) % hidden.size


def _new_size(ratio: float, hidden: Hidden) -> int:
    size = max(1, round(ratio * hidden.size))
    if not hidden.experts or size == hidden.size:
        return size
    return -(-size // EXPERT_UNITS) * EXPERT_UNITS


def _is_plain(teacher: nn.Module, hidden: Hidden) -> bool:
    """Say whether a module is two linear layers, with at most an activation and dropout, and takes one argument."""
    parameters = inspect.signature(teacher.forward).parameters.values()
    alone = sum(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters) == 1
    linear = not hidden.experts and all(is_linear(teacher.get_submodule(name)) for name in hidden.maps)
    return alone and linear and not _others(teacher, hidden)


@torch.no_grad()
def _strongest(teacher: nn.Module, hidden: Hidden, size: int) -> Tensor:
    """Select the hidden units with the largest product of weight norms, in their old order; for each expert its own."""
    score = _lengths(teacher, hidden, hidden.weights[-1])[0]
    for axis in hidden.weights[:-1]:
        for part in _lengths(teacher, hidden, axis):
            score = score * part
    return score.argsort(dim=-1, descending=True, stable=True)[..., :size].sort(dim=-1).values


def _lengths(teacher: nn.Module, hidden: Hidden, axis: Axis) -> list[Tensor]:
    """Return the norms of the weights of each unit: (units), or (experts, units); two of them for gate and value."""
    weight = teacher.get_parameter(axis.name).detach().float()
    summed = [dim for dim in range(weight.dim()) if dim != axis.dim and not (hidden.experts and dim == 0)]
    norms = torch.linalg.vector_norm(weight, dim=summed)
    parts = norms.unflatten(-1, (-1, axis.rows)).unbind(-1) if axis.interleaved else norms.chunk(axis.rows, dim=-1)
    return list(parts)


def _dropouts(teacher: nn.Module, hidden: Hidden) -> tuple[float, float]:
    """Read the dropout of the hidden layer and of the output, if modules are registered in the order of their calls."""
    names = [name for name, _ in teacher.named_modules()]
    last = names.index(hidden.leaving)
    within, after = 0.0, 0.0
    for place, module in enumerate(teacher.modules()):
        if isinstance(module, nn.Dropout):
            within, after = (module.p, after) if place < last else (within, module.p)
    return within, after
