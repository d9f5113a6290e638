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
    """Remember the past of a recurrent student: as much after a million tokens as after a hundred.

    It takes the place of the layer that a cache was made with, and answers questions about lengths as that one would, since
    layers with softmax beside it share their masks with it.
    """

    supports_early_init = False

    def __init__(self, replaced: Any, keep: Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.is_sliding = bool(getattr(replaced, "is_sliding", False))
        self.room: int | None = getattr(replaced, "max_cache_len", None)  # of a cache of fixed length
        self.window: int | None = getattr(replaced, "sliding_window", self.room if self.is_sliding else None)
        self.seen = int(replaced.get_seq_length())
        self.state: State = {}
        self.pending: State = {}  # keys, values and padding that are not yet in the state
        if self.seen:  # a prefix that someone else put there
            self.pending = {"k": replaced.keys[:, :, : self.seen], "v": replaced.values[:, :, : self.seen]}
            self.pending |= {} if keep is None else {"keep": keep[:, : self.seen]}

    def past(self, mixer: Mixer) -> State:
        """Return the state after all tokens so far; empty if there were none."""
        if self.pending:
            k, v, keep = self.pending["k"], self.pending["v"], self.pending.get("keep")
            self.state, self.pending = mixer.after(k, v, keep, self.state or None), {}
        return self.state

    def add(self, k: Tensor, v: Tensor, keep: Tensor | None, mixer: Mixer) -> None:
        """Remember tokens; in training, where the past is rarely asked for, only when it is."""
        self.past(mixer)
        self.pending = {"k": k, "v": v} if keep is None else {"k": k, "v": v, "keep": keep}
        self.seen += k.shape[2]
        self.is_initialized = True
        if not torch.is_grad_enabled():
            self.past(mixer)

    def get_seq_length(self) -> int:
        """Return how many tokens have been seen."""
        return self.seen

    def get_max_length(self) -> int:
        """Return the room of a cache of fixed length; -1 is no limit."""
        return -1 if self.room is None else self.room

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how long a mask must be, and where it begins."""
        dropped = 0 if self.window is None else max(0, self.seen - self.window + 1)
        return max(self.seen - dropped + query_length, self.room or 0), dropped

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams that a search keeps."""
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the sequences."""
        self._each(lambda x: x[indices])

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.pending, self.seen = {}, {}, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to forget single tokens."""
        if tokens_to_remove:
            raise StudentError(
                f"the last {abs(tokens_to_remove)} tokens were to be taken out of a cache.",
                "A layer in it is recurrent: its state cannot be undone.",
                "generate without an assistant model, or copy.deepcopy the cache before tokens that may be taken back.",
            )

    def offload(self) -> None:
        """Stay: a state is small."""

    def prefetch(self) -> None:
        """Be there already."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: a state begins with the first token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse to be read as keys and values."""
        raise StudentError(
            "keys and values were to be read from a layer of a cache.",
            "A recurrent student wrote to it, which keeps a state instead.",
            "begin with a fresh cache when teachers and students change places.",
        )

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state = {name: change(x) for name, x in self.state.items()}
        self.pending = {name: change(x) for name, x in self.pending.items()}


def state_layer(cache: Any, index: int, keep: Tensor | None) -> StateLayer:
    """Return the layer of a cache that belongs to a recurrent student, made on its first call.

    `keep` marks padding among the tokens that the layer may hold by then.
    """
    cache = getattr(cache, "self_attention_cache", cache)  # of an encoder and a decoder
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    if not isinstance(cache.layers[index], StateLayer):
        cache.layers[index] = StateLayer(cache.layers[index], keep)
    layer: StateLayer = cache.layers[index]
    return layer
