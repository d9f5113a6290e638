"""The closed form: how gated students start, from what the heads of their teachers look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from segue.errors import StudentError
from segue.sites import Site
from segue.students.attention.mixer import repeat_heads
from segue.students.attention.mixers.gated import GatedMixer
from segue.students.attention.mixers.softmax import SoftmaxMixer

__all__ = ["ClosedForm"]

WRITE, SHARPER = 0.3, 0.4  # a head that looks at everything alike writes the first, one that looks at one token both
SMALLEST, LARGEST = 0.1, 10.0  # scale of values
NEAREST = 1.0  # tokens; a head that looks at itself alone would forget everything at once


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """Start gated students from the attention weights of their teachers; see `handover.calibrate`.

    The half-life of a head is the mean distance that it looks back. It writes 0.3 + 0.4 times the concentration of its weights,
    1 - entropy / log(tokens). Its values are scaled by least squares, between 0.1 and 10. The output gate stays open.
    """

    def mixer(self, student: nn.Module, site: Site) -> GatedMixer:
        """Find the mixer whose gates are set."""
        found = getattr(student, "mixer", None)
        if not isinstance(found, GatedMixer):
            raise StudentError(
                f"ClosedForm() cannot start the student at site {site.name!r}.",
                f"{getattr(student, 'operator', type(student).__name__)} has no gates.",
                "use it with GatedLinear or GatedDeltaNet; LeastSquares() fits other students. Nothing was changed.",
            )
        return found


class MixerCall(NamedTuple):
    """What a mixer gets in a call, and what it returns."""

    q: Tensor
    k: Tensor
    v: Tensor
    token_mask: Tensor | None
    causal: bool
    y: Tensor

    @property
    def real(self) -> Tensor:
        """The tokens that count, (batch, tokens)."""
        return torch.ones_like(self.v[:, 0, :, 0], dtype=torch.bool) if self.token_mask is None else self.token_mask

    def weights(self, mixer: GatedMixer) -> Tensor:
        """Return the attention weights of the teacher, whose projections these queries and keys are made by."""
        return SoftmaxMixer(mixer.scale).weights(self.q, self.k, self.token_mask, self.causal, None).float()


def attention_sums(call: MixerCall, mixer: GatedMixer) -> Tensor:
    """Sum per head over the tokens that have a choice: how far they look, how sharply, and how many they are; (3, heads)."""
    weights, place = call.weights(mixer), call.real.cumsum(1).float()
    choice = (place if call.causal else place[:, -1:].expand_as(place))[:, None]  # tokens to look at
    far = (weights * (place[:, None, :, None] - place[:, None, None, :]).abs()).sum(-1)
    sharp = 1 - torch.special.entr(weights).sum(-1) / choice.clamp_min(2).log()
    counts = (call.real[:, None] & (choice > 1)).expand_as(far)
    return torch.stack([(x * counts).sum((0, 2)) for x in (far, sharp, counts)]).float()


def output_products(call: MixerCall, mixer: GatedMixer) -> Tensor:
    """Sum per head the products of what student and teacher return, and the squares of the student's; (2, heads)."""
    theirs = call.weights(mixer) @ repeat_heads(call.v, call.q.shape[1]).float()
    ours = call.y.float() * call.real[:, None, :, None]
    return torch.stack([(ours * theirs).sum((0, 2, 3)), ours.square().sum((0, 2, 3))])


def biases(summed: Tensor, mixer: GatedMixer) -> Tensor:
    """Return the biases of the gates that `attention_sums` leads to; query heads that share keys share their mean."""
    far, sharp = (summed[:2] / summed[2].clamp_min(1)).view(2, mixer.gates.key_heads, -1).mean(-1)
    return mixer.gates.biases(far.clamp_min(NEAREST), WRITE + SHARPER * sharp)


def value_scale(summed: Tensor) -> Tensor:
    """Return the factors of the values, (heads, 1, 1), that `output_products` leads to."""
    product, square = summed
    fitted: Tensor = (product / square.clamp_min(torch.finfo(square.dtype).tiny)).clamp(SMALLEST, LARGEST)
    return fitted[:, None, None]
