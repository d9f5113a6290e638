"""MLP students: a narrower, wider or gated hidden layer, in any MLP whose hidden layer can be found and verified."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.border import Fraction, Rule, checked
from segue.errors import StudentError
from segue.sites import Site
from segue.students.attention.spec import Projection, is_transposed_linear, projection
from segue.students.initialisation import CopyMatching, Initialisation, Kaiming, Net2Net, Original
from segue.students.layers import clone
from segue.students.low_rank import is_linear

__all__ = ["GatedMlp", "NarrowMlp", "WideMlp"]


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
        size = max(1, round(self.ratio * hidden.size))
        student = _with_hidden(teacher, hidden, size)
        self.init(student, {**_others(teacher, hidden), **_originals(teacher, hidden, _strongest(teacher, hidden, size))})
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
        student = _with_hidden(teacher, hidden, round(self.ratio * hidden.size))
        self.init(student, {**_others(teacher, hidden), **_originals(teacher, hidden)})
        return student


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
            student = _with_hidden(teacher, hidden, max(1, round(1.5 * self.ratio * hidden.size)))
        else:
            student = self._gated(teacher, hidden, site)
        Kaiming()(student, {})
        return student

    def _gated(self, teacher: nn.Module, hidden: Hidden, site: Site) -> nn.Module:
        if other := next(iter(_others(teacher, hidden)), None):
            raise StudentError(
                f"GatedMlp(ratio={self.ratio:.4g}) cannot replace the module at site {site.name!r}.",
                f"It is {type(teacher).__name__}, which contains {other!r} besides its two linear layers.",
                "choose the MLP without it, or write your own student: fn(teacher, site) -> module. Nothing was changed.",
            )
        enter, leave = (projection(teacher.get_submodule(name)) for name in (*hidden.entering, hidden.leaving))
        student = SwiGlu(enter, leave, max(1, round(self.ratio * hidden.size)), *_dropouts(teacher, hidden))
        for name, value in vars(teacher).items():
            plain = isinstance(value, bool | int | float | str) or name == "config"
            if plain and not name.startswith("_") and not hasattr(student, name):
                setattr(student, name, value)
        student.train(teacher.training)
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

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.down(self.hidden_dropout(F.silu(self.gate(x)) * self.up(x))))
        return y


@dataclass(frozen=True)
class Hidden:
    """The hidden layer of an MLP, by the names of the linear layers around it."""

    entering: tuple[str, ...]
    leaving: str
    size: int
    blocks: int = 1  # 2 where one entering layer computes gate and value, half and half

    @property
    def gated(self) -> bool:
        return len(self.entering) * self.blocks == 2

    @property
    def maps(self) -> tuple[str, ...]:
        return (*self.entering, self.leaving)


def hidden_layer(teacher: nn.Module, site: Site, student: str) -> Hidden:
    """Find the hidden layer of an MLP, or raise an error that says why there is none.

    Shapes propose which linear layers enter and leave it. Doubling every hidden unit verifies it: with random weights, the
    module must return the same as before.
    """
    found = _hidden(teacher)
    if found is not None:
        return found
    maps = {name: projection(part).weight.shape for name, part in teacher.named_modules() if is_linear(part)}
    listed = ", ".join(f"{name or 'itself'} {into} -> {out}" for name, (out, into) in list(maps.items())[:6])
    inside = next((name for name, part in teacher.named_modules() if name and _hidden(part) is not None), None)
    if inside is not None:
        hint = f"choose the MLP inside it: {site.name + '.' + inside!r}."
    elif len(maps) == 1:
        hint = (
            "BERT-like models split their MLP over two modules, `intermediate` and `output`: use LowRankMlp(rank=...) on "
            "either, or replace complete layers with a Span."
        )
    else:
        hint = (
            "LowRankMlp(rank=...) takes any module with linear layers; or write your own student: fn(teacher, site) -> module."
        )
    raise StudentError(
        f"{student} cannot replace the module at site {site.name!r}.",
        f"It is {type(teacher).__name__}, in which no hidden layer is found; its linear layers are {listed or 'none'}.",
        f"{hint} Nothing was changed.",
    )


def _hidden(module: nn.Module) -> Hidden | None:
    return next((hidden for hidden in _candidates(module) if _is_verified(module, hidden)), None)


def _candidates(module: nn.Module) -> Iterator[Hidden]:
    """Propose hidden layers by shape: one layer in and one out, or two in where the MLP is gated."""
    maps = {name: projection(part).weight.shape for name, part in module.named_modules() if is_linear(part)}
    if len(maps) not in (2, 3):
        return
    for leaving in reversed(maps):
        size = maps[leaving][1]
        entering = tuple(name for name in maps if name != leaving)
        outs, ins = {maps[name][0] for name in entering}, {maps[name][1] for name in entering}
        if len(ins) == 1 and outs == {size}:
            yield Hidden(entering, leaving, size)
        elif len(entering) == 1 and outs == {2 * size}:
            yield Hidden(entering, leaving, size, blocks=2)


@torch.no_grad()
def _is_verified(module: nn.Module, hidden: Hidden) -> bool:
    generator = torch.Generator().manual_seed(0)
    probe = clone(module).eval().float()
    for parameter in probe.parameters():
        spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
        parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    first = projection(probe.get_submodule(hidden.entering[0])).weight
    x = torch.randn(1, 3, first.shape[1], generator=generator).to(first.device)
    twice = _with_hidden(probe, hidden, 2 * hidden.size)
    Net2Net()(twice, _originals(probe, hidden))
    try:
        before, after = probe(x.clone()), twice(x.clone())
    except Exception:  # whatever it raises, it is not an MLP of one argument with this hidden layer
        return False
    return isinstance(before, Tensor) and before.shape == after.shape and torch.allclose(before, after, rtol=1e-3, atol=1e-4)


def _with_hidden(teacher: nn.Module, hidden: Hidden, size: int) -> nn.Module:
    """Copy an MLP with another number of hidden units; the weights around them are left empty."""
    student = clone(teacher)
    for name in hidden.entering:
        student.set_submodule(name, _sized(student.get_submodule(name), out=hidden.blocks * size))
    student.set_submodule(hidden.leaving, _sized(student.get_submodule(hidden.leaving), into=size))
    for name in ("intermediate_size", "hidden_features"):
        if getattr(student, name, None) == hidden.size:
            setattr(student, name, size)
    return student


def _sized(module: nn.Module, *, out: int | None = None, into: int | None = None) -> nn.Module:
    """Resize a linear layer, which is our own copy."""
    weight, bias = projection(module)
    out, into = out or weight.shape[0], into or weight.shape[1]
    transposed = is_transposed_linear(module)
    module.weight = nn.Parameter(weight.new_empty((into, out) if transposed else (out, into)))
    if bias is not None:
        module.bias = nn.Parameter(bias.new_empty(out))
    names = ("nf", "nx") if transposed else ("out_features", "in_features")
    for name, value in zip(names, (out, into), strict=True):
        setattr(module, name, value)
    return module


def _originals(teacher: nn.Module, hidden: Hidden, units: Tensor | None = None) -> dict[str, Original]:
    """Return the linear layers around the hidden layer, or the parts of them that belong to some of its units."""
    maps = {name: projection(teacher.get_submodule(name)) for name in hidden.maps}
    if units is None:
        return dict(maps)
    rows = torch.cat([units + block * hidden.size for block in range(hidden.blocks)])
    chosen: dict[str, Original] = {}
    for name, (weight, bias) in maps.items():
        if name == hidden.leaving:
            chosen[name] = Projection(weight[:, units], bias)
        else:
            chosen[name] = Projection(weight[rows], None if bias is None else bias[rows])
    return chosen


def _others(teacher: nn.Module, hidden: Hidden) -> dict[str, Original]:
    """Return the other modules with parameters or statistics of their own, such as a norm before the first layer."""
    holders = ((name, module) for name, module in teacher.named_modules() if name and name not in hidden.maps)
    return {name: module for name, module in holders if not list(module.children()) and module.state_dict()}


def _strongest(teacher: nn.Module, hidden: Hidden, size: int) -> Tensor:
    """Select the hidden units with the largest product of weight norms, in their old order."""
    maps = {name: projection(teacher.get_submodule(name)).weight.detach().float() for name in hidden.maps}
    score: Tensor = torch.linalg.vector_norm(maps[hidden.leaving], dim=0)
    for name in hidden.entering:
        for part in maps[name].chunk(hidden.blocks):
            score = score * torch.linalg.vector_norm(part, dim=1)
    return score.argsort(descending=True, stable=True)[:size].sort().values


def _dropouts(teacher: nn.Module, hidden: Hidden) -> tuple[float, float]:
    """Read the dropout of the hidden layer and of the output, if modules are registered in the order of their calls."""
    names = [name for name, _ in teacher.named_modules()]
    last = names.index(hidden.leaving)
    within, after = 0.0, 0.0
    for place, module in enumerate(teacher.modules()):
        if isinstance(module, nn.Dropout):
            within, after = (module.p, after) if place < last else (within, module.p)
    return within, after
