"""Copies: what a deep copy or a pickle of a running handover is."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import fields
from typing import Any

from torch import nn

from segue.errors import HandoverError, SegueWarning
from segue.plan import Plan


class Copied:
    """Let a handover be copied and pickled together with its model: a complete twin, which runs on its own.

    The model refers to its handover by its hooks, so a copy of the model has a copy of the handover too.
    """

    model: nn.Module
    plan: Plan

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "last_input": None, "on_release": None}  # a batch, perhaps with a graph; who keeps the teachers

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        if id(self.model) in memo:
            warnings.warn(
                f"the copy of a model in a handover does not follow it: it stays as it is now, {self}. To keep an average "
                "of the weights, or to train both, copy the handover (twin = copy.deepcopy(handover), twin.model) and call "
                "step() on both.",
                SegueWarning,
                stacklevel=2,
            )
        twin = memo[id(self)] = object.__new__(type(self))
        vars(twin).update(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        for field in fields(self.plan):
            value = getattr(self.plan, field.name)
            try:
                pickle.dumps(value)
            except Exception as error:
                raise HandoverError(
                    "a model in a handover cannot be pickled with this plan.",
                    f"Pickle cannot take {field.name}={value!r}: {error}.",
                    "save it with segue.save(handover, folder), or the model after finalize_(); or define that function at the "
                    "top of a module.",
                ) from None
        return super().__reduce_ex__(protocol)
