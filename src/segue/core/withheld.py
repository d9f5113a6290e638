"""What code outside a seam may read of the module behind it: plain settings, but no weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn

from segue.errors import HandoverError

# What nn.TransformerEncoder asks of its attention before it considers the fast path.
TORCH_FLAGS = ("_qkv_same_embed_dim",)

Call: TypeAlias = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]


def setting_of(module: nn.Module, name: str, place: str, call: Call | None = None) -> Any:
    """Return a plain setting of a module behind a seam; its methods are withheld as well as its weights.

    `call` calls a part of the module by its name inside.
    """
    value = getattr(module, name)
    if isinstance(value, Tensor | nn.Module):
        return Withheld(place, name, value, call)
    if callable(value) and getattr(value, "__self__", None) is module:
        raise AttributeError(f"{name!r} at {place!r} is a method, which a seam does not offer")
    return value


class Withheld:
    """Stand for a weight or a module behind a seam: answer for its plain settings, and refuse the use of weights."""

    requires_grad = True

    def __init__(self, place: str, part: str, behind: object, call: Call | None = None) -> None:
        self.name, self._place, self._part, self._behind, self._call = f"{place}.{part}", place, part, behind, call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name not in TORCH_FLAGS:
            raise AttributeError(name)
        value = getattr(self._behind, name)
        if isinstance(value, bool | int | float | str | None):
            return value
        return Withheld(self._place, f"{self._part}.{name}", value, self._call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self._behind, nn.Module):  # a method of the weight, as in weight.div_(2)
            weight, _, method = self.name.rpartition(".")
            raise _used_outside(weight, f"calls {method}() of")
        if self._call is None:
            raise _used_outside(self.name)
        return self._call(self._part, args, kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = next((x.name for x in (*args, *(kwargs or {}).values()) if isinstance(x, Withheld)), "?")
        raise _used_outside(name)


def _used_outside(name: str, does: str = "uses") -> HandoverError:
    return HandoverError(
        f"code outside a site {does} the weights {name!r} inside it.",
        "Teacher and student share that place, so using the weights of one side would bypass the handover.",
        "choose a site that contains that code, or switch it off, as config.rescale_every = 0 does in RWKV.",
    )
