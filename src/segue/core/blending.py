"""Blending: how two outputs become one, and what else a call brings: caches, and outputs that are captured or recorded."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from segue.errors import HandoverError, PlanError, SegueError, StudentError, three_lines
from segue.similarity import as_real
from segue.sites import Site
from segue.students.attention.cache_copy import copy_state, is_cache, with_caches

CACHE_MOVES = ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices", "reset")


def mix(teacher: Tensor, student: Tensor, weight: float | Tensor) -> Tensor:
    """Blend two tensors: the teacher's at weight 0 and the student's at 1, bit for bit, whatever the other side holds.

    Half-precision outputs are blended in float32 and cast back; under autocast the teacher's dtype wins. What is not
    floating is not blended: the teacher's at weight 0, else the student's.
    """
    student = student.to(teacher.dtype)
    if isinstance(weight, float):
        if weight == 1.0:
            return student
        if weight == 0.0:
            if not student.requires_grad:
                return teacher
            return torch.where(teacher.new_ones((), dtype=torch.bool), teacher, student)  # keeps a zero gradient
        return _lerp(teacher, student, weight) if blendable(teacher) else student
    if not blendable(teacher):
        return torch.where(weight == 0, teacher, student)
    between = _lerp(teacher, student, weight)
    return torch.where(weight == 0, teacher, torch.where(weight == 1, student, between))


def _lerp(teacher: Tensor, student: Tensor, weight: float | Tensor) -> Tensor:
    if teacher.is_complex():
        return torch.view_as_complex(_lerp(as_real(teacher), as_real(student), weight).contiguous())
    narrow = teacher.dtype in (torch.float16, torch.bfloat16)
    t, s = (teacher.float(), student.float()) if narrow else (teacher, student)
    w = weight.to(t.dtype) if isinstance(weight, Tensor) else weight
    return torch.lerp(t, s, w).to(teacher.dtype)


def blendable(x: Tensor) -> bool:
    """Return whether a tensor holds real or complex numbers in floating point."""
    return x.is_floating_point() or x.is_complex()


def merge(teacher: Any, student: Any, join: Callable[[Tensor, Tensor], Tensor], site: Site, at: str = "output") -> Any:
    """Walk two equal trees and join them tensor by tensor; where either side is None, so is the result."""
    if teacher is None or student is None:
        return None
    if getattr(type(student), "is_withheld", False):  # it refuses to be used, as in the finished model
        return student
    if isinstance(teacher, Tensor) and isinstance(student, Tensor):
        _require_alike(teacher, student, site, at)
        return join(teacher, student)
    if isinstance(teacher, Tensor) or isinstance(student, Tensor):
        raise _differs(site, at, type(teacher).__name__, type(student).__name__)
    if isinstance(teacher, dict) and isinstance(student, dict):  # a Hugging Face ModelOutput is one
        _require_same(list(teacher), list(student), "the keys", site, at)
        merged = {key: merge(teacher[key], student[key], join, site, f"{at}.{key}") for key in teacher}
        return type(student)(**merged) if dataclasses.is_dataclass(student) else type(student)(merged)
    if isinstance(teacher, tuple | list) and isinstance(student, tuple | list):
        _require_same(len(teacher), len(student), "the number of values", site, at)
        values = [merge(t, s, join, site, f"{at}[{i}]") for i, (t, s) in enumerate(zip(teacher, student, strict=True))]
        return type(student)(*values) if hasattr(student, "_fields") else type(student)(values)
    if dataclasses.is_dataclass(teacher) and dataclasses.is_dataclass(student) and not isinstance(student, type):
        names = [field.name for field in dataclasses.fields(teacher)]
        _require_same(names, [field.name for field in dataclasses.fields(student)], "the fields", site, at)
        result = copy.copy(student)
        for name in names:
            value = merge(getattr(teacher, name), getattr(student, name), join, site, f"{at}.{name}")
            object.__setattr__(result, name, value)
        return result
    if is_cache(teacher) and is_cache(student) and teacher is not student:
        _attach(student, teacher)  # made inside the call: each side will find its own past again
    return student


def first_floating(output: Any, site: Site) -> Tensor:
    """Return the tensor that guidance and similarity compare: the first floating one."""
    for x in tensors(output):
        if blendable(x):
            return x
    raise StudentError(
        f"the output at site {site.name!r} cannot be compared.",
        f"{type(output).__name__} holds no floating tensor.",
        "choose a site whose module returns one.",
    )


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from tensors(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors(getattr(tree, field.name))


def detached(tree: Any) -> Any:
    """Return the same tree with its tensors detached from the graph."""
    if isinstance(tree, Tensor):
        return tree.detach()
    if isinstance(tree, dict):
        inside = {key: detached(value) for key, value in tree.items()}
        return type(tree)(**inside) if dataclasses.is_dataclass(tree) else inside  # a Hugging Face ModelOutput
    if isinstance(tree, tuple | list) and not hasattr(tree, "_fields"):
        return type(tree)(detached(value) for value in tree)
    return tree


def call_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read an example batch: keyword arguments as a dict, several arguments as a tuple, else the one argument."""
    if isinstance(example, dict) or (hasattr(example, "keys") and not isinstance(example, Tensor)):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


@contextmanager
def calling(what: str, hint: str | None = None) -> Iterator[None]:
    """Say which argument it was, where a model cannot be called with what a user gave for it."""
    try:
        yield
    except SegueError:
        raise
    except Exception as error:
        raise PlanError(
            f"the model cannot be called with the {what}.",
            f"It raises {type(error).__name__}: {error}",
            hint or "give it as the model is called: a tensor, a tuple of arguments or a dict of keyword arguments.",
        ) from error


def padding_mask(batch: Any) -> Tensor | None:
    """Return the `attention_mask` of a batch of keyword arguments, 1 where a token counts; None where it has none."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def fork_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the teacher caches of its own.

    Hugging Face passes a key/value cache through the call, in training too. If both sides wrote to it, the second would attend
    to the keys of the first. The teacher's cache stays with the student's, so it remembers its own past.
    """
    return with_caches(_teachers_cache, args, kwargs)


def _teachers_cache(cache: Any) -> Any:
    if "_segue_teachers" not in cache.__dict__:
        _attach(cache, copy_state(cache))
    return cache._segue_teachers


def _attach(cache: Any, teachers: Any) -> None:
    """Let the teacher's cache travel with the student's and follow its moves, such as a beam search's reordering."""
    if "_segue_teachers" not in cache.__dict__:
        cache.__class__ = _in_step(cache.__class__)
    cache._segue_teachers = teachers


@lru_cache
def _in_step(kind: Any) -> type:
    def follow(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            getattr(self._segue_teachers, name)(*args, **kwargs)
            return getattr(kind, name)(self, *args, **kwargs)

        return method

    return type(kind.__name__, (kind,), {name: follow(name) for name in CACHE_MOVES if hasattr(kind, name)})


def _require_alike(teacher: Tensor, student: Tensor, site: Site, at: str) -> None:
    if teacher.shape != student.shape:
        raise _differs(site, at, f"shape {tuple(teacher.shape)}", f"shape {tuple(student.shape)}")
    if teacher.device != student.device:
        raise _differs(site, at, f"device {teacher.device}", f"device {student.device}")
    if teacher.dtype != student.dtype and not torch.is_autocast_enabled(teacher.device.type):
        raise _differs(site, at, str(teacher.dtype), str(student.dtype))


def _require_same(teacher: object, student: object, what: str, site: Site, at: str) -> None:
    if teacher != student:
        raise _differs(site, at, f"{what} {teacher}", f"{what} {student}")


def _differs(site: Site, at: str, teacher: str, student: str) -> StudentError:
    return StudentError(
        f"the student at site {site.name!r} must return what its teacher returns.",
        f"At {at} the teacher gives {teacher}, the student {student}.",
        "give the student the same interface; handover.cancel_() brings the original model back.",
    )


@contextmanager
def captured_outputs() -> Iterator[dict[str, list[Any]]]:
    """Collect the attentions and hidden states that the hooks of a Hugging Face model capture inside, instead of the model.

    While both sides of a seam run, the model would capture both and return twice as many attentions as it has layers. So the
    captured outputs of each side are collected here, blended like its output, and given to the model once (`capture`).
    """
    collector = _collector()
    given = None if collector is None else collector.get()
    collected: dict[str, list[Any]] = {}
    if collector is None or given is None:
        yield collected
        return
    # a copy, not an empty list: the hooks count the layers that came before
    trial = {key: list(value) if _is_capture(key, value) else value for key, value in given.items()}
    token = collector.set(trial)
    try:
        yield collected
    finally:
        collector.reset(token)
        for key, value in given.items():
            if _is_capture(key, value) and len(trial[key]) > len(value):
                collected[key] = trial[key][len(value) :]


def capture(outputs: dict[str, list[Any]]) -> None:
    """Give captured outputs to the model."""
    for key, values in outputs.items():
        _collector().get()[key].extend(values)


def same_layout(a: dict[str, list[Any]], b: dict[str, list[Any]]) -> bool:
    """Return whether two sides have captured the same outputs, so that they can be blended."""
    return a.keys() == b.keys() and all(len(a[key]) == len(b[key]) for key in a)


def _collector() -> Any:
    if torch.compiler.is_compiling():
        return None
    return getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)


def _is_capture(key: str, value: Any) -> bool:
    return isinstance(value, list) and not key.startswith("_")


class GraphError(HandoverError, AssertionError):
    """A handover that cannot become one graph. As an AssertionError it leaves torch's tracer unwrapped."""


def refuse_recording_under_checkpointing() -> bool:
    """Refuse, at trace time, to record outputs inside a checkpointed region that must be part of one graph."""
    if torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint or not _in_checkpointed_region_of_one_graph():
        return True
    text = three_lines(
        "guidance cannot record the outputs of a site in this compiled graph.",
        "The site is in a region under activation checkpointing, and torch.compile(fullgraph=True) lets nothing out of it.",
        "set torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True (the gradients are the same), "
        "or compile without fullgraph.",
    )
    raise GraphError(text)  # one text, because torch appends to the first argument where it was raised


# What torch.compiler.assume_constant_result sets: run at trace time. The decorator itself would load the compiler here.
refuse_recording_under_checkpointing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _in_checkpointed_region_of_one_graph() -> bool:
    """Ask torch's tracer; it has no public interface, so where its internals differ the error is that of torch."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        translator: Any = InstructionTranslator.current_tx()
        one_graph = translator.one_graph or translator.error_on_graph_break
        tracer = translator.output.current_tracer
        while tracer is not None and "checkpoint" not in str(tracer.source_target).lower():
            tracer = tracer.parent
    except (ImportError, AttributeError):
        return False
    return bool(one_graph) and tracer is not None
