"""The task of stories15M with what a search of settings needs: held-out training texts, and data by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from experiments.stories15m.runs import AT_ONCE, HELD_OUT, NextToken, Stories
from segue.data.files import located
from segue.lab.tasks import Loaded
from segue.training.batches import Batches, InOrder


@dataclass(frozen=True)
class Fidelity(NextToken):
    """The same with a score of which the original has 1: exp(-KL). 95 % of it is a KL of 0.051 nats, 99 % of 0.010."""

    def scores(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the mean over each text."""
        found = self.compared(model, batch)
        return {**found, "fidelity": (-found["kl"]).exp()}


@dataclass(frozen=True, kw_only=True)
class HeldOutStories(Stories):
    """Evaluate on the last texts, or on `hold_out` training texts to choose settings."""

    hold_out: int = 0

    score = "fidelity"

    @property
    def loss(self) -> Any:
        return Fidelity(str(located(self.model)))

    def load(self, *, data_fraction: float = 1.0, seed: int = 0) -> Loaded:
        """Load the model and its texts from the folder of data; evaluations during a run use the first of the held-out ones."""
        here = Stories(model=str(located(self.model)), text=str(located(self.text)))
        known = here.load(data_fraction=data_fraction, seed=seed)
        ids = load_file(here.text)["input_ids"].long()
        train, held = ids[self.hold_out : -HELD_OUT], ids[: self.hold_out] if self.hold_out else ids[-HELD_OUT:]
        final, few = (InOrder(count, AT_ONCE, lambda chosen: {"input_ids": held[chosen]}) for count in (len(held), AT_ONCE))
        return replace(
            known,
            train=lambda size, seed: Batches(len(train), size, lambda chosen, _: {"input_ids": train[chosen]}, seed=seed),
            validation=few if len(held) > AT_ONCE else final,
            final=final,
            examples=len(train),
        )
