"""The seam of a span: several layers by one, where each layer is called by the model itself.

The layers of the teacher run in their own places, each with what the model gives it: masks, rotations and caches may differ
from layer to layer. The student runs where the first of them is and is called as it is, as in the finished model. Where the
last one is, both outputs are there and become one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from segue.core.blending import capture, captured_outputs, first_floating, fork_caches, same_layout, tensors
from segue.core.modes import Mode, Watch
from segue.core.seam import Seam
from segue.core.withheld import setting_of
from segue.errors import HandoverError
from segue.sites import Site
from segue.students.layers import layers_of

_TAKEN_OUT = object()


@dataclass
class Forward:
    """One forward on its way through the layers of a span."""

    site: Site
    seam: SpanSeam | None = None  # or its replica on another device
    mode: Mode = Mode.TEACHER
    watch: Watch = Watch.NOTHING
    weight: float | Tensor = 0.0
    student: Any = None  # its output, where the teacher runs too
    captured: dict[str, list[Any]] = field(default_factory=dict)  # what the model captures inside the student
    output: Any = None  # what the model got at the last place
    given: list[Tensor] = field(default_factory=list)  # the tensors that the last place was called with
    versions: list[int] = field(default_factory=list)  # of the tensors in `output`
    places: int = 0  # that were called
    again: bool = False  # activation checkpointing repeats it during backward()


class SpanSeam(Seam):
    """Stand at the first layer of a span."""

    def __init__(self, teacher: nn.Module, student: nn.Module, site: Site) -> None:
        super().__init__(teacher, student, site)
        self.forwards: dict[int, Forward] = {}  # by thread: replicas of DataParallel share this dictionary

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mode, watch, weight = self._decide(args, kwargs)
        if mode is Mode.SKIP_STUDENT and self._needs_student():
            mode = Mode.HOLD
        run = Forward(self.site, self, mode, watch, weight, again=_recomputes())
        if mode is Mode.STUDENT:
            with captured_outputs() as run.captured:
                output = self._student_alone(args, kwargs, watch)
            capture(run.captured)
        elif mode in (Mode.TEACHER, Mode.SKIP_STUDENT):
            output = self.call_layer(0, mode, args, kwargs)
        else:
            first = layers_of(self.require_teacher())[0]
            (output, captured), (run.student, run.captured) = self._both(args, kwargs, mode is Mode.HOLD, first)
            capture(captured)
        self.forwards[_thread()] = run
        return hand_out(run, output, args, kwargs)

    def call_layer(self, place: int, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call one layer of the teacher, as the model calls it."""
        layer = layers_of(self.require_teacher())[place]
        return layer(*args, **kwargs) if mode is Mode.TEACHER else self._call_teacher(args, kwargs, layer)

    def finish(self, run: Forward, teacher: Any, captured: dict[str, list[Any]]) -> Any:
        """Return what the span returns, where its last layer is."""
        students = _at_one_layer(run.captured)
        captured = captured if same_layout(captured, students) else students
        weight = {Mode.HOLD: 0.0, Mode.COMPARE: 1.0}.get(run.mode, run.weight)
        return self._joined((teacher, captured), (run.student, students), weight, run.watch, run.mode is Mode.HOLD)

    def require_complete(self) -> None:
        """Refuse a forward of the model that did not call all layers of the span."""
        run = self.forwards.pop(_thread(), None)
        if run is not None and not run.again:
            raise _out_of_order(self.site, run.places, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "forwards": {}}


class SpanLayer(nn.Module):
    """Stand at a later layer of a span: run it, or hand on what the student has returned."""

    seam: SpanSeam

    def __init__(self, seam: SpanSeam, place: int) -> None:
        super().__init__()
        self.__dict__["seam"] = seam  # no submodule: it has its own place in the model
        self.place = place

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        site, thread = self.seam.site, _thread()
        run = self.seam.forwards.get(thread)
        if _recomputes() and (run is None or run.places != self.place or not hands_on(run, args, kwargs)):
            run = _kept_for_backward(args, kwargs, site, self.place)
        elif run is None or run.places != self.place:
            raise _out_of_order(site, 0 if run is None else run.places, self.place)
        elif run.mode is not Mode.TEACHER and not hands_on(run, args, kwargs):
            raise changed_between(site, self.place)
        last = self.place == len(site.members) - 1
        if last:
            self.seam.forwards.pop(thread, None)
        if run.mode is Mode.STUDENT:
            capture(_at_one_layer(run.captured))  # as many as before, so that their positions stay
            return run.output if last else hand_out(run, run.output, args, kwargs)
        seam = run.seam or self.seam
        if run.mode in (Mode.TEACHER, Mode.SKIP_STUDENT):
            output = seam.call_layer(self.place, run.mode, args, kwargs)
            if last:
                return output if run.mode is Mode.TEACHER else seam._tied(output)
            return hand_out(run, output, args, kwargs)
        with captured_outputs() as captured:
            output = seam.call_layer(self.place, run.mode, *fork_caches(args, kwargs))
        if last:
            return seam.finish(run, output, captured)
        capture(captured)
        return hand_out(run, output, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Answer for the plain settings of the layer whose place this is: models choose masks by them."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            seam = self.__dict__.get("seam")
            if seam is None or name.startswith("_"):
                raise
            owner = seam.student if seam.teacher is None else layers_of(seam.teacher)[self.place]
            return setting_of(owner, name, seam.site.members[self.place])


def _at_one_layer(captured: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return what the model captures at a layer; at the first one of all, its input comes before."""
    return {key: values[-1:] if key == "hidden_states" else values for key, values in captured.items()}


def hand_out(run: Forward, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Remember what the model gets at one place of a span, to see what it gives to the next."""
    run.output, run.places = output, run.places + 1
    run.given = list(tensors((args, kwargs)))
    run.versions = [_version(x) for x in tensors(output)]
    _keep_for_backward(run)
    return output


def hands_on(run: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the model gives to a layer, unchanged, what the layer before it has returned."""
    before = list(tensors(run.output))
    now = list(tensors((args, kwargs)))
    new = [x for x in now if not any(x is y for y in (*run.given, *before))]
    if torch.compiler.is_compiling():
        new = []  # values are not known
    elif [_version(x) for x in before] != run.versions:
        return False
    stream = first_floating(run.output, run.site)
    for x in before:
        if any(x is y for y in now):
            continue
        alike = [y for y in new if y.shape == x.shape and y.dtype == x.dtype]
        if (alike or x is stream) and not any(torch.equal(x, y) for y in alike):
            return False
    return True


def changed_between(site: Site, place: int) -> HandoverError:
    """Return the error for a model that changes the hidden state between two layers of a span."""
    return HandoverError(
        f"the layers of the span at {site.name!r} do not follow one another.",
        f"The model changes what {site.members[place - 1]!r} returns before it calls {site.members[place]!r} with it, "
        "so that one layer cannot stand for both.",
        "choose spans that do not contain that place (first=, last=).",
    )


def _out_of_order(site: Site, called: int, place: int | None) -> HandoverError:
    found = f"It calls {site.members[max(called - 1, 0)]!r}" if called else "It does not call the first one"
    then = "and not the next" if place is None else f"and then {site.members[place]!r}"
    return HandoverError(
        f"the model does not call the layers of the span at {site.name!r} one after another.",
        f"{found} {then}.",
        "switch off what skips layers (layerdrop=0.0), or choose single layers as sites.",
    )


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def _version(x: Tensor) -> int:
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def _recomputes() -> bool:
    """Return whether activation checkpointing repeats a forward during backward()."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _may_checkpoint() -> bool:
    """Return whether hooks on saved tensors are set, as activation checkpointing does; torch 2.6 does not say, so yes."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


def _keep_for_backward(run: Forward) -> None:
    """Attach a forward to the hidden state where activation checkpointing may repeat the layers alone, in any order."""
    if torch.compiler.is_compiling() or not _may_checkpoint():
        return
    stream = first_floating(run.output, run.site)
    # without the stream itself: the two would keep each other in memory
    output = _exchanged(run.output, stream, _TAKEN_OUT) if run.mode is Mode.STUDENT else None
    stream._segue_forward = replace(run, output=output, given=[], versions=[])  # type: ignore[attr-defined]


def _kept_for_backward(args: tuple[Any, ...], kwargs: dict[str, Any], site: Site, place: int) -> Forward:
    for x in tensors((args, kwargs)):
        run: Forward | None = getattr(x, "_segue_forward", None)
        if run is not None and run.site == site and run.places == place:
            return replace(run, output=_exchanged(run.output, _TAKEN_OUT, x)) if run.mode is Mode.STUDENT else run
    raise HandoverError(
        f"activation checkpointing cannot repeat layer {site.members[place]!r} of a span.",
        "The hidden state that it kept is not the one of the forward, as with use_reentrant=True.",
        "use checkpoint(..., use_reentrant=False), or checkpoint all layers of a span together.",
    )


def _exchanged(tree: Any, old: object, new: object) -> Any:
    """Return a tree of outputs with one of its values exchanged."""
    if tree is old:
        return new
    if isinstance(tree, dict):
        return type(tree)({key: _exchanged(value, old, new) for key, value in tree.items()})
    if isinstance(tree, tuple | list):
        values = [_exchanged(value, old, new) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree
