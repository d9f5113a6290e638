"""One token after a state: what `Attention.forward` does for it, with as little Python as there can be.

Next to the products of a decoded token, what Python does around them counts. So a module of the common form, four projections
and a recurrent mixer, takes this way where a call brings nothing but a token, its rotation and a cache with a state. All
others take the long way, and both return the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks

if TYPE_CHECKING:
    from segue.students.attention.module import Attention

PARTS = ("query", "key", "value", "output", "mixer", "output_dropout")


def decode_token(module: Attention, arguments: dict[str, Any]) -> Any:
    """Return what the module returns for one token that continues a state; None where it takes the long way."""
    parts: dict[str, Any] = module._modules
    found = module.interface.unpack_token(arguments) if len(parts) == len(PARTS) else None
    if found is None or not module.causal or module.settings["clip"] is not None:
        return None
    x, rotary, cache = found
    layer = layer_to_continue(cache, module.layer_idx) if x.shape[1] == 1 else None
    by_name: list[Any] = [parts.get(name) for name in PARTS]
    query, key, value, output, mixer, dropout = by_name
    if layer is None or not (mixer.recurrent and is_plain(query) and is_plain(key) and is_plain(value) and is_plain(output)):
        return None
    batch, heads, key_heads = x.shape[0], module.heads, module.key_heads
    q, k, v = _project(query, x), _project(key, x), _project(value, x).view(batch, key_heads, 1, -1)
    both = torch.cat([q, k], -1).view(batch, heads + key_heads, 1, -1)
    if rotary is not None:
        both = module.interface.rotate_joined(both, heads, rotary)
    q, k = both.split_with_sizes([heads, key_heads], 1)
    y = _project(output, layer.step(mixer, q, k, v, None).reshape(batch, 1, -1))
    return module.interface.pack(dropout(y) if dropout.p else y)


def layer_to_continue(cache: Any, index: int | None) -> Any:
    """Return the layer of a cache whose state one token continues, where none so far is padding; or None."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    layer = layers[index] if index is not None and index < len(layers) else None
    return layer if getattr(layer, "has_current_state", False) else None


def is_plain(linear: nn.Module | None) -> bool:
    """Return whether a projection is torch's own, and nobody listens to its calls or changed them."""
    if type(linear) is not nn.Linear or hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return False
    return not (linear._forward_hooks or linear._forward_pre_hooks or "forward" in linear.__dict__)


def _project(linear: nn.Linear, x: Tensor) -> Tensor:
    parameters: dict[str, Any] = linear._parameters
    return F.linear(x, parameters["weight"], parameters["bias"])


def apply_linear(linear: nn.Module, x: Tensor) -> Tensor:
    """Call a projection; for one token a plain one without the call of a module."""
    if x.shape[1] != 1 or torch.is_grad_enabled() or not is_plain(linear):
        y: Tensor = linear(x)
        return y
    assert isinstance(linear, nn.Linear)
    return _project(linear, x)
