"""A layer of a Hugging Face cache that keeps a mixer's state instead of all keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from segue.errors import StudentError
from segue.students.attention.mixer import Mixer, State


class StateLayer(CacheLayerMixin):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """Keep the state of a recurrent student: as large after a million tokens as after a hundred.

    It replaces the layer that the cache was created with, and reports lengths as that one would, because the layers of a
    model share their masks.
    """

    supports_early_init = False

    def __init__(self, replaced: Any, token_mask: Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.is_sliding = bool(getattr(replaced, "is_sliding", False))
        self.room: int | None = getattr(replaced, "max_cache_len", None)  # of a static cache
        self.window: int | None = getattr(replaced, "sliding_window", self.room if self.is_sliding else None)
        self.seen = int(replaced.get_seq_length())
        self.state: State = {}
        self.pending: State = {}  # keys, values and padding that are not yet in the state
        self.recorded = False  # gradients may need the state as it is
        self.hidden: Tensor | None = None  # (batch,), `_hidden_places` of all tokens so far; None: none is padding
        if self.seen:  # a prefix that another module put there
            self.pending = {"k": replaced.keys[:, :, : self.seen], "v": replaced.values[:, :, : self.seen]}
            if token_mask is not None:
                self.pending["token_mask"] = token_mask[:, : self.seen]
                self.hidden = _hidden_places(token_mask[:, : self.seen]).sum(1)

    @property
    def has_current_state(self) -> bool:
        """Whether there is a state, and it is that after all tokens so far, of which none is padding."""
        return bool(self.state) and not self.pending and self.hidden is None

    def hide(self, token_mask: Tensor | None, tokens: int, operator: str) -> None:
        """Note the padding in a mask of all tokens with the new ones; refuse one that hides others of the past than before."""
        looks = not torch.compiler.is_compiling()  # compiled code cannot, and only notes the padding for what follows it
        if token_mask is None:
            if looks and self.hidden is not None:
                if bool(self.hidden.any()):
                    raise changed_past(operator)
                self.hidden = None
            return
        hidden = _hidden_places(token_mask)
        before = hidden[:, :-tokens].sum(1)
        if looks:
            same = (before == (0 if self.hidden is None else self.hidden)).all()
            if same.device.type != "cpu" and tokens == 1:  # Python would wait too long for the device, which checks by itself
                torch._assert_async(same, str(changed_past(operator)))  # type: ignore[no-untyped-call, unused-ignore]
            elif not same:
                raise changed_past(operator)
        now = hidden.sum(1)
        self.hidden = None if looks and now.device.type == "cpu" and not now.any() else now

    def current(self, mixer: Mixer) -> State:
        """Return the state after all tokens so far; empty before the first."""
        if self.pending:
            k, v, token_mask = self.pending["k"], self.pending["v"], self.pending.get("token_mask")
            self.state, self.pending = mixer.update_state(k, v, token_mask, self.state or None), {}
            self.recorded = torch.is_grad_enabled()
        return self.state

    def step(self, mixer: Mixer, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None) -> Tensor:
        """Mix one token that follows the state, and go on to the next; mixers write to states that no gradient needs."""
        records = torch.is_grad_enabled()
        if self.recorded and not records:
            self._each(torch.clone)
        y, self.state = mixer.decode_step(q, k, v, token_mask, self.state)
        self.recorded = records
        self.seen += 1
        return y

    def append(self, k: Tensor, v: Tensor, token_mask: Tensor | None, mixer: Mixer) -> None:
        """Add tokens; with gradients, where the state is rarely read, they wait until it is."""
        self.current(mixer)
        self.pending = {"k": k, "v": v} if token_mask is None else {"k": k, "v": v, "token_mask": token_mask}
        self.seen += k.shape[2]
        self.is_initialized = True
        if not torch.is_grad_enabled():
            self.current(mixer)

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.seen

    def get_max_length(self) -> int:
        """Return the length of a static cache; -1 is no limit."""
        return -1 if self.room is None else self.room

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of a mask, and where it begins."""
        dropped = 0 if self.window is None else max(0, self.seen - self.window + 1)
        return max(self.seen - dropped + query_length, self.room or 0), dropped

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the sequences that a beam search keeps."""
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the sequences."""
        self._each(lambda x: x[indices])

    def reset(self) -> None:
        """Remove all tokens."""
        self.state, self.pending, self.seen, self.hidden = {}, {}, 0, None

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to remove tokens."""
        if tokens_to_remove:
            raise StudentError(
                f"the last {abs(tokens_to_remove)} tokens cannot be removed from this cache.",
                "A recurrent student keeps a state there, which is a sum over all tokens.",
                "generate without an assistant model, or copy.deepcopy the cache before tokens that may be removed.",
            )

    def offload(self) -> None:
        """Do nothing: a state is small."""

    def prefetch(self) -> None:
        """Do nothing: a state is never offloaded."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: a state begins with the first token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse to return keys and values."""
        raise StudentError(
            "this layer of the cache holds no keys and values.",
            "A recurrent student keeps a state there instead.",
            "start with a new cache when teachers and students change places.",
        )

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state = {name: change(x) if isinstance(x, Tensor) else x for name, x in self.state.items()}
        self.pending = {name: change(x) for name, x in self.pending.items()}
        self.hidden = None if self.hidden is None else change(self.hidden)


def _hidden_places(token_mask: Tensor) -> Tensor:
    """Return a scattered number for the place of each hidden token and 0 for the others: their sum tells which are hidden."""
    places = torch.arange(1, token_mask.shape[1] + 1, device=token_mask.device) * -7046029254386353131
    places = (places ^ (places >> 29)) * -4658895280553007687  # products wrap, as in a hash
    return (places ^ (places >> 32)) * ~token_mask


def changed_past(operator: str) -> StudentError:
    """Make the error of a mask that hides other tokens of the past than the masks before it."""
    return StudentError(
        f"{operator} cannot hide a token, or show one, after it was read.",
        "The mask of this call hides other tokens of the past than the masks before it, and the past is a state by now.",
        "give the mask of all tokens so far, with the padding as it was, or start with a new cache.",
    )


def keeps_other_states(cache: Any, index: int | None) -> bool:
    """Return whether a layer of a cache holds the states of another module too, which a state of ours must not replace."""
    layers = getattr(cache, "layers", ())
    return index is not None and index < len(layers) and hasattr(layers[index], "conv_states")


def state_layer(cache: Any, index: int, token_mask: Callable[[], Tensor | None]) -> StateLayer:
    """Return a recurrent student's layer of a cache, created on its first call.

    `token_mask` returns that of the tokens that the layer may hold by then.
    """
    cache = getattr(cache, "self_attention_cache", cache)  # of an encoder and a decoder
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    if not isinstance(cache.layers[index], StateLayer):
        cache.layers[index] = StateLayer(cache.layers[index], token_mask())
    layer: StateLayer = cache.layers[index]
    return layer
