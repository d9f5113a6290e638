"""The proof that a module was read rightly: softmax attention with its spec and its weights returns what it returns."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segue.errors import SegueError, StudentError
from segue.sites import Site
from segue.students.attention.cache_copy import copy_caches, is_cache
from segue.students.attention.masks import padding_in
from segue.students.attention.spec import AttentionInterface, AttentionSpec, Projection

BATCH, TOKENS = 2, 6
MATTERS = 0.02  # of the norm of the output: the least that attention weights change
STEEP = 2.0  # the standard deviation of the logits at which attention weights differ clearly


class MisreadError(Exception):
    """Softmax attention with this spec is not what the module computes; `off` says by how much, where it could be compared."""

    def __init__(self, reason: str, off: float = math.inf) -> None:
        super().__init__(reason)
        self.off = off


class NotCalledError(MisreadError):
    """A module raises where its interface calls it to prove its spec."""


def prove(module: nn.Module, interface: AttentionInterface, spec: AttentionSpec) -> None:
    """Call a module on a few tokens as its interface says it may be called, and raise `MisreadError` if no call agrees.

    Where its weights are such that attention hardly matters (an output of zeros), any reading would look right: then a copy
    with random weights is called.
    """
    if spec.query.weight.is_meta:
        return
    if not _agrees(module, interface, spec):
        other = _with_random_weights(module)
        _agrees(other, interface, interface.parse(other))


def _agrees(module: nn.Module, interface: AttentionInterface, spec: AttentionSpec) -> bool:
    """Raise `MisreadError` if no call agrees; return whether one that does shows that attention matters."""
    control, x = _control(interface, spec), _tokens(spec)
    reasons = []
    for args, kwargs in interface.probes(module, spec, x):
        try:
            compare(module, control, args, kwargs)
        except MisreadError as error:
            reasons.append(error)
        else:
            return _attention_matters(control, args, kwargs)
    if type(interface).probes is AttentionInterface.probes and all(isinstance(reason, NotCalledError) for reason in reasons):
        return True  # a registered interface need not say how its module is called: the first real call proves it
    if reasons:
        raise min(reasons, key=lambda reason: reason.off)
    return True


@torch.no_grad()
def _attention_matters(control: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Compare with attention whose queries and keys say nothing."""
    y = _first(control(*args, **kwargs))
    scale, control.mixer.scale = control.mixer.scale, 0.0  # type: ignore[union-attr]
    uniform = _first(control(*args, **kwargs))
    control.mixer.scale = scale  # type: ignore[union-attr]
    return bool((y - uniform).norm() > MATTERS * y.norm())


@torch.no_grad()
def _with_random_weights(module: nn.Module) -> nn.Module:
    from segue.students.layers import clone

    generator = torch.Generator().manual_seed(0)
    copied = clone(module).float()
    for parameter in copied.parameters():
        drawn = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.copy_(1.0 + 0.2 * drawn if parameter.dim() < 2 else drawn * parameter.shape[-1] ** -0.5)
    return copied


def prove_reload(module: nn.Module, interface: AttentionInterface, spec: AttentionSpec, choice: int) -> None:
    """Raise `MisreadError` unless the weights of a student, saved and loaded into another one, are all that it needs.

    The other one is built from a module with other weights, as a teacher is that is fetched again, and read in the same way:
    by the interface's candidate of this number.
    """
    if spec.query.weight.is_meta:
        return
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    again = next(islice(type(interface).candidates(other), choice, None))
    saved, loaded = _control(interface, spec), _control(again, again.parse(other))
    try:
        loaded.load_state_dict(saved.state_dict())
    except RuntimeError as error:
        raise MisreadError(f"A saved student cannot be loaded again: {error}", off=0.0) from error
    for args, kwargs in interface.probes(module, spec, _tokens(spec)):
        try:
            again.see_output(module(*args, **kwargs))
            same = torch.equal(_first(saved(*args, **kwargs)), _first(loaded(*args, **kwargs)))
        except Exception:  # a way to call it that is not the module's: the proof has found another
            continue
        if not same:
            text = "A saved student is another one when it is loaded: its interface keeps weights of its own."
            raise MisreadError(text, off=0.0)


def prove_call(
    module: nn.Module, interface: AttentionInterface, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Do the same for a real call, and raise an error that a user reads; one in the middle of a generation is not the first."""
    spec = interface.parse(module)
    caches = [x for x in (*args, *kwargs.values()) if is_cache(x)]
    if caches and any(_continues(x, spec.layer, _is_cross(interface, args, kwargs)) for x in caches):
        return
    try:
        compare(module, _control(interface, spec), args, kwargs)
    except MisreadError as reason:
        raise StudentError(
            f"Segue does not read the attention at site {site.name!r} as this call means it.",
            str(reason),
            "handover.cancel_() brings the original model back; register an interface that reads such calls "
            "(segue.students.register_attention).",
        ) from None


@torch.no_grad()
def compare(module: nn.Module, control: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `MisreadError` unless a module and its control return the same at every token that is not padding."""
    try:
        with _evaluating(module):
            own_args, own_kwargs = copy_caches(args, kwargs)  # the module writes to them
            output = module(*own_args, **own_kwargs)
    except Exception as error:
        raise NotCalledError(f"Called as the interface expects, it raises {type(error).__name__}: {error}") from error
    control.interface.see_output(output)  # type: ignore[operator, union-attr]
    try:
        own_args, own_kwargs = copy_caches(args, kwargs)
        ours = control(*own_args, **own_kwargs)
        call = control.interface.unpack(*args, **kwargs)  # type: ignore[operator, union-attr]
    except SegueError as error:
        raise MisreadError(f"It is called with something that the interface refuses: {error}") from error
    except Exception as error:
        raise MisreadError(f"The interface cannot read the call: {type(error).__name__}: {error}") from error
    if _first(output).is_meta:  # without values there is nothing to compare, only operations to count
        return
    tokens = call.token_mask if call.mask is None else padding_in(call.mask, call.x.shape[0])
    residual = control.interface.residual(call)  # type: ignore[operator, union-attr]
    least = 1e-3 if _is_precise(module, _first(output)) else 5e-2
    _require_equal(_first(output), _first(ours), least, None if call.cross else tokens, residual)
    for their, our in zip(_further(output), _further(ours), strict=False):  # a second stream; weights are not ours to return
        if isinstance(their, Tensor) and isinstance(our, Tensor):
            _require_equal(their, our, least)


def _require_equal(
    theirs: Tensor, ours: Tensor, least: float, tokens: Tensor | None = None, residual: Tensor | None = None
) -> None:
    """Raise `MisreadError` unless two outputs agree, up to a part of what attention adds to a residual."""
    if ours.shape != theirs.shape:
        raise MisreadError(f"It returns a tensor of shape {tuple(theirs.shape)}, softmax attention one of {tuple(ours.shape)}.")
    attended = theirs if residual is None else theirs - residual
    if tokens is not None and ours.dim() == 3 and tokens.shape == ours.shape[:2]:
        ours, theirs, attended = ours[tokens], theirs[tokens], attended[tokens]
    off = float((ours - theirs).norm() / attended.norm().clamp_min(1e-12))
    if not off <= least:
        raise MisreadError(f"Softmax attention with its weights returns another result, off by {off:.2g} of its norm.", off)


def _is_precise(module: nn.Module, output: Tensor) -> bool:
    """Return whether a module computes in float32 or better throughout."""
    if torch.is_autocast_enabled(output.device.type):
        return False
    return all(x.dtype in (torch.float32, torch.float64) for x in (output, *module.parameters()) if x.is_floating_point())


def _control(interface: AttentionInterface, spec: AttentionSpec) -> nn.Module:
    from segue.students.attention.joint import attention_module
    from segue.students.attention.mixers.softmax import SoftmaxMixer
    from segue.students.initialisation import CopyMatching

    mixer = SoftmaxMixer(spec.logit_scale, spec.softcap, spec.sinks).to(spec.query.weight)
    control = attention_module(spec, interface, mixer)
    CopyMatching()(control, dict(control.originals(spec)))
    return control.eval()


def _tokens(spec: AttentionSpec) -> Tensor:
    """Return the tokens of a probe, large enough for attention weights that differ clearly."""
    like = spec.query.weight
    made_for = (getattr(part, "tokens", None) for part in (spec.bias, spec.reduction))  # a bias has one length
    tokens = next((count for count in made_for if count is not None), TOKENS)
    x = torch.arange(1.0 * BATCH * tokens * spec.width, device=like.device).square().sin().view(BATCH, tokens, -1)
    return (x * _steepness(spec, x)).to(like.dtype)


@torch.no_grad()
def _steepness(spec: AttentionSpec, x: Tensor) -> float:
    """Return a factor of the input that makes attention weights differ clearly, whatever the size of the weights."""
    if spec.query_norm is not None or spec.input_norm is not None:
        return 1.0
    logits = spec.head_size**0.5 * spec.logit_scale * _spread(spec.query, x) * _spread(spec.key, x)
    return float(min(max((STEEP / max(logits, 1e-6)) ** 0.5, 1.0), 1e3))


def _spread(part: Projection, x: Tensor) -> float:
    if part.weight.shape[1] != x.shape[-1]:
        return 1.0
    return float(F.linear(x.to(part.weight.dtype), *part).float().std())


def _continues(cache: Any, layer: int | None, cross: bool) -> bool:
    """Return whether the layer of a cache that a module reads holds tokens; those of other modules may, in a first call too."""
    if cross and hasattr(cache, "is_updated"):
        return bool(cache.is_updated.get(layer))
    return bool(getattr(cache, "self_attention_cache", cache).get_seq_length(layer or 0))


def _is_cross(interface: AttentionInterface, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        return interface.unpack(*args, **kwargs).cross
    except Exception:  # the comparison says why
        return False


def _first(output: Any) -> Tensor:
    while isinstance(output, tuple | list):
        output = output[0]
    if not isinstance(output, Tensor):
        raise MisreadError(f"It returns {type(output).__name__}, not a tensor.")
    return output


def _further(output: Any) -> tuple[Any, ...]:
    return tuple(output[1:]) if isinstance(output, tuple | list) else ()


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = {part: part.training for part in module.modules()}
    try:
        for part in modes:
            part.training = False
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
