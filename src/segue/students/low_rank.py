"""Low-rank students: every linear layer of a module as a product of two thin matrices."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.border import PositiveInt, checked
from segue.errors import StudentError
from segue.sites import Site
from segue.students.attention.spec import Projection, is_transposed_linear, projection
from segue.students.initialisation import Initialisation, Original, TruncatedSvd
from segue.students.layers import clone

__all__ = ["LowRankMlp"]


@checked
@dataclass(frozen=True, kw_only=True)
class LowRankMlp:
    """Copy the teacher with each linear layer replaced by a product of two matrices of the given rank; the rest stays as it is.

    >>> student = LowRankMlp(rank=2)(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), Site("mlp"))
    >>> student[0]
    LowRankLinear(in_features=8, out_features=16, rank=2, bias=True)

    The teacher may be any module that contains linear layers, or one linear layer. A rank above the smaller side of a matrix is
    refused: it would need more parameters and express nothing more.
    """

    rank: PositiveInt
    init: Initialisation = field(default_factory=TruncatedSvd)

    def __call__(self, teacher: nn.Module, site: Site) -> nn.Module:
        named = [(name, module) for name, module in teacher.named_modules(remove_duplicate=False) if is_linear(module)]
        self._check(teacher, site, dict(named))
        student = clone(teacher)
        made: dict[nn.Module, LowRankLinear] = {}
        originals: dict[str, Original] = {}
        for name, module in named:
            if module not in made:
                made[module] = _low_rank(module, self.rank)
                originals[name] = projection(module)
            if name:
                student.set_submodule(name, made[module])
            else:
                student = made[module]
        self.init(student, originals)
        return student

    def _check(self, teacher: nn.Module, site: Site, maps: dict[str, nn.Module]) -> None:
        problem = f"LowRankMlp(rank={self.rank}) cannot replace the module at site {site.name!r}."
        if not maps:
            children = ", ".join(type(part).__name__ for part in teacher.children()) or "no submodules"
            raise StudentError(
                problem,
                f"It is {type(teacher).__name__} ({children}), which contains no linear layer.",
                "choose modules that contain nn.Linear or GPT-2's Conv1D; NarrowMlp(ratio=...) also takes stacked "
                "experts and 1x1 convolutions. Nothing was changed.",
            )
        for name, module in maps.items():
            out, into = projection(module).weight.shape
            what = f"{name or 'the teacher'} ({type(module).__name__})"
            if not projection(module).weight.is_floating_point():
                raise StudentError(
                    problem,
                    f"{what} is quantised to {projection(module).weight.dtype}.",
                    "load the model without quantisation. Nothing was changed.",
                )
            if self.rank > min(out, into):
                raise StudentError(
                    problem,
                    f"{what} maps {into} features to {out}, so its rank is at most {min(out, into)}.",
                    f"give a rank of at most {min(out, into)}; below {out * into / (out + into):.4g} it saves parameters. "
                    "Nothing was changed.",
                )


class LowRankLinear(nn.Module):
    """A linear layer of limited rank: y = up (down x) + bias."""

    def __init__(self, original: Projection, rank: int) -> None:
        super().__init__()
        weight, bias = original
        (self.out_features, self.in_features), self.rank = weight.shape, rank
        self.down = nn.Parameter(weight.new_empty(rank, self.in_features))
        self.up = nn.Parameter(weight.new_empty(self.out_features, rank))
        self.bias = None if bias is None else nn.Parameter(weight.new_empty(self.out_features))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the factors so that their product has the variance that Kaiming gives to a full matrix."""
        self.down.normal_(std=self.in_features**-0.5)
        self.up.normal_(std=(2 / self.rank) ** 0.5)
        if self.bias is not None:
            self.bias.zero_()

    @property
    def weight(self) -> Tensor:
        """The product of the factors, for code that reads the weight of a linear layer."""
        return self.up @ self.down

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.down), self.up, self.bias)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"
        return f"{sizes}, bias={self.bias is not None}"


def is_linear(module: nn.Module) -> bool:
    """Recognise a linear layer: nn.Linear, a subclass that computes the same, or GPT-2's Conv1D."""
    if not isinstance(module, nn.Linear):
        return is_transposed_linear(module)
    return type(module).forward is nn.Linear.forward or not module.weight.is_floating_point() or _computes_the_same(module)


@torch.no_grad()
def _computes_the_same(module: nn.Linear) -> bool:
    """Try a subclass with a forward of its own: the router of a mixture of experts returns more than a product."""
    x = torch.linspace(-1, 1, 2 * module.in_features).reshape(2, -1).to(module.weight)
    try:
        found = module(x)
    except Exception:  # it is called in another way
        return False
    return isinstance(found, Tensor) and torch.equal(found, F.linear(x, module.weight, module.bias))


def _low_rank(module: nn.Module, rank: int) -> LowRankLinear:
    made = LowRankLinear(projection(module), rank)
    for name, value in vars(module).items():
        if isinstance(value, bool | int | float | str) and not name.startswith("_"):
            setattr(made, name, value)  # nf and nx of a Conv1D, and other settings that code around it reads
    return made
