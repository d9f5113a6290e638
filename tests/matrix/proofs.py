"""What a cell of the matrix must prove: comparisons of outputs, and of what a model reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.matrix.entries import Batch, Entry, real_tokens

CLOSE = 1e-3  # the largest relative difference of what must be equal in float32
SAME = 1e-5  # of what is the same computation in another order
BLIND = 1e-6  # below it, a change of the input has no effect


class SilentlyWrongError(Exception):
    """A student was accepted and does not do what it must."""


def first_tensor(output: Any) -> Tensor:
    """Return the main output of a model: the first floating tensor in what it returns."""
    if isinstance(output, Tensor):
        return output
    for part in output.values() if isinstance(output, dict) else output:
        if isinstance(part, Tensor) and part.is_floating_point():
            return part
        if isinstance(part, dict | tuple | list) and part:
            return first_tensor(part)
    raise TypeError(f"no tensor in {type(output).__name__}")


def call(model: nn.Module, batch: Batch) -> Tensor:
    return first_tensor(model(*batch.args, **batch.kwargs))


@torch.no_grad()
def outputs(model: nn.Module, batch: Batch) -> Tensor:
    """Return the main output in evaluation, at the tokens that are not padding."""
    return counted(call(model.eval(), batch), batch)


def counted(output: Tensor, batch: Batch) -> Tensor:
    real = batch.real
    return output[real] if real is not None and output.shape[:2] == real.shape else output


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the relative difference of two outputs, infinite where one is not finite."""
    if found.shape != expected.shape or not found.isfinite().all():
        return float("inf")
    return float((found - expected).norm() / expected.norm().clamp_min(1e-12))


def require_close(found: Tensor, expected: Tensor, what: str, most: float = CLOSE) -> None:
    if found.shape != expected.shape:
        raise SilentlyWrongError(f"{what}: shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
    if not found.isfinite().all():
        raise SilentlyWrongError(f"{what}: not finite")
    if (off := difference(found, expected)) > most:
        raise SilentlyWrongError(f"{what}: off by {off:.2g}")


def with_other_future(batch: Batch, begin: int) -> Batch:
    """Change every token from one position on."""

    def change(tokens: Tensor) -> Tensor:
        tokens[:, begin:] = other(tokens[:, begin:])
        return tokens

    return batch.varied(change)


def with_other_padding(batch: Batch) -> Batch:
    def change(tokens: Tensor) -> Tensor:
        assert batch.real is not None
        tokens[~batch.real] = other(tokens[~batch.real])
        return tokens

    return batch.varied(change)


def with_other_order(batch: Batch) -> Batch:
    """Exchange two tokens, or two patches of an image."""

    def change(tokens: Tensor) -> Tensor:
        if (side := batch.patch) is None:
            return tokens[:, [2, 1, 0, *range(3, tokens.shape[1])]]
        first, last = tokens[..., :side, :side].clone(), tokens[..., -side:, -side:].clone()
        tokens[..., :side, :side], tokens[..., -side:, -side:] = last, first
        return tokens

    return batch.varied(change)


def other(tokens: Tensor) -> Tensor:
    """Return other tokens; a constant added to features would be lost in the next norm."""
    return 1.5 * tokens.flip(-1) - tokens if tokens.is_floating_point() else 5 + (tokens + 3) % 50


def pooled(output: Tensor, batch: Batch) -> Tensor:
    """Average over tokens: what a model that is blind to their order does not change."""
    if output.dim() < 3:
        return output
    if batch.real is not None and output.shape[:2] == batch.real.shape:
        weights = batch.real[..., None].float()
        return (output * weights).sum(1) / weights.sum(1)
    return output.mean(1)


class Reads:
    """What a model reads besides the present token: the future, padding, the order."""

    def __init__(self, entry: Entry, model: nn.Module) -> None:
        batch, self.future, self.padding, self.order = entry.batch(), 0.0, 0.0, None
        if batch.tokens is None:
            return
        with torch.no_grad():
            plain = call(model.eval(), batch)
            if entry.causal:
                begin = plain.shape[1] // 2
                changed = call(model, with_other_future(batch, begin))
                kept = batch.real[:, :begin] if batch.real is not None else slice(None)
                self.future = difference(changed[:, :begin][kept], plain[:, :begin][kept])
            if batch.real is not None:
                self.padding = difference(counted(call(model, with_other_padding(batch)), batch), counted(plain, batch))
            if not entry.causal:
                swapped = call(model, with_other_order(batch))
                self.order = difference(pooled(swapped, batch), pooled(plain, batch))

    def require(self, student: Reads, *, order: bool) -> None:
        """Refuse a student that reads what its teacher, which this describes, does not read, or is blind where it is not."""
        if self.future <= SAME < student.future:
            raise SilentlyWrongError(f"a later token changes earlier outputs by {student.future:.2g}")
        if self.padding <= SAME < student.padding:
            raise SilentlyWrongError(f"the content of padding changes the output by {student.padding:.2g}")
        if order and self.order is not None and student.order is not None and self.order > CLOSE and student.order < BLIND:
            raise SilentlyWrongError("blind to the order of tokens")


def generated(entry: Entry, model: nn.Module, *, cached: bool) -> Tensor:
    """Continue a prompt greedily, padded on the left."""
    from transformers import GenerationConfig

    given = {name: value for name, value in entry.batch().kwargs.items() if name != "decoder_input_ids"}
    if "decoder_input_ids" not in entry.batch().kwargs and "attention_mask" in given:
        given["attention_mask"] = real_tokens(left=True).long()
    start = (
        {} if (first := getattr(model.config, "decoder_start_token_id", None)) is None else {"decoder_start_token_id": first}
    )
    settings = GenerationConfig(max_new_tokens=5, do_sample=False, use_cache=cached, pad_token_id=0, eos_token_id=None, **start)
    with torch.no_grad():
        return model.eval().generate(**given, generation_config=settings)
