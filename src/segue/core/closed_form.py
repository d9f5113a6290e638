"""The closed form on the stream of the original model: look at its heads, set gates and factors, scale the values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from segue.core.backbone import evaluating
from segue.core.blending import captured_outputs, first_floating
from segue.core.calibrate import Fitted, run_original, set_, undone_on_failure
from segue.core.seam import Seam
from segue.core.surgery import unreached
from segue.students.attention.cache_copy import copy_caches
from segue.students.attention.mixers.gated import GatedMixer
from segue.students.closed_form import (
    ClosedForm,
    FarFactor,
    MixerCall,
    attention_sums,
    biases,
    distances,
    log_factors,
    output_products,
    value_scale,
)

if TYPE_CHECKING:
    from segue.core.handover import Handover


def start_gates(
    handover: Handover, batches: Iterable[Any], method: ClosedForm, mask: Callable[[Any], Tensor | None]
) -> dict[str, Fitted]:
    """Start every student's gates in three passes over the batches; a failure leaves them as they were."""
    mixers = {name: method.mixer(seam.student, seam.site) for name, seam in handover.seams.items()}
    batches = list(batches)

    def listen(measure: Callable[[MixerCall, GatedMixer], Tensor]) -> dict[str, _Listener]:
        return _listen(handover, batches, mask, mixers, measure)

    with undone_on_failure() as earlier:
        before = listen(attention_sums)
        for name, mixer in mixers.items():
            set_(mixer.gates.weight, torch.zeros(mixer.gates.weight.shape), earlier)
            set_(mixer.gates.bias, biases(before[name].sums, mixer), earlier)
            set_(mixer.value_scale, torch.ones(mixer.value_scale.shape), earlier)
        scales = listen(output_products)
        for name, mixer in mixers.items():
            set_(mixer.value_scale, value_scale(scales[name].sums), earlier)
        after = listen(output_products)
    return {name: Fitted(before[name].error, after[name].error) for name in mixers}


def start_far(
    handover: Handover, batches: Iterable[Any], method: FarFactor, mask: Callable[[Any], Tensor | None]
) -> dict[str, Fitted]:
    """Start every student's far factors in two passes over the batches; a failure leaves them as they were."""
    mixers = {name: method.mixer(seam.student, seam.site) for name, seam in handover.seams.items()}
    batches = list(batches)
    with undone_on_failure() as earlier:
        before = _listen(handover, batches, mask, mixers, distances)
        for name, mixer in mixers.items():
            set_(mixer.log_far, log_factors(before[name].sums), earlier)
        after = _listen(handover, batches, mask, mixers, distances)
    return {name: Fitted(before[name].error, after[name].error) for name in mixers}


def _listen(
    handover: Handover,
    batches: list[Any],
    mask: Callable[[Any], Tensor | None],
    mixers: Mapping[str, nn.Module],
    measure: Callable[[MixerCall, Any], Tensor],
) -> dict[str, _Listener]:
    """Run the batches once, and measure at the heads of every student."""
    heard = {name: _Listener(seam, mixers[name], measure) for name, seam in handover.seams.items()}
    run_original(handover, batches, mask, list(heard.values()))
    for name, listener in heard.items():
        if not listener.calls:
            raise unreached(name)
        listener.share()
    return heard


class _Listener:
    """Run a student on the inputs of its teacher, sum up what is measured at its heads, and how far it is from its teacher."""

    def __init__(self, seam: Seam, mixer: nn.Module, measure: Callable[[MixerCall, Any], Tensor]) -> None:
        self.seam, self.mixer, self.measure = seam, mixer, measure
        self.mask: Tensor | None = None
        self.calls, self.sums, self.errors = 0, torch.zeros(()), torch.zeros(2)
        teacher = seam.require_teacher()
        self._handles = [
            teacher.register_forward_pre_hook(self._before, with_kwargs=True),
            teacher.register_forward_hook(self._after),
            mixer.register_forward_hook(self._mixed, with_kwargs=True),
        ]

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()

    def share(self) -> None:
        """Add the sums of all processes."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for part in (self.sums, self.errors):
                torch.distributed.all_reduce(part)

    @property
    def error(self) -> float:
        missed, size = self.errors.tolist()
        return float((missed / (size or 1.0)) ** 0.5)

    def _before(self, _teacher: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = copy_caches(args, kwargs)
        with evaluating(self.seam.student), captured_outputs():  # the model must not take them for its own
            self._output = first_floating(self.seam.student(*args, **kwargs), self.seam.site)

    def _mixed(self, _mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        q, k, v, token_mask, causal = (*args, kwargs.get("causal", False))[:5]
        if self.mask is not None and self.mask.shape == (v.shape[0], v.shape[2]):
            real = self.mask.bool().to(v.device)
            token_mask = real if token_mask is None else token_mask & real
        self.calls += 1
        self.sums = self.sums + self.measure(MixerCall(q, k, v, token_mask, causal, output), self.mixer)

    def _after(self, _teacher: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        target = first_floating(output, self.seam.site)
        missed, size = (self._output - target).float().square(), target.float().square()
        if self.mask is not None and self.mask.shape == target.shape[:2]:
            missed, size = (x * self.mask.to(x)[..., None] for x in (missed, size))
        self.errors = self.errors.to(size.device) + torch.stack([missed.sum(), size.sum()])
