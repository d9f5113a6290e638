"""The seam: the module at a site while teacher and student share the work.

It knows nothing of gates, schedules or methods. It holds a teacher, a student and one number, the student's weight, and blends
every floating-point tensor that the two return. The handover writes its state once a step (`configure`). From that state one
pure function, `mode_of`, decides what the next forwards do, and `forward` does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.fx._symbolic_trace as _fx
from torch import Tensor, nn

from segue.core.blending import (
    blendable,
    capture,
    captured_outputs,
    detached,
    first_floating,
    fork_caches,
    merge,
    mix,
    refuse_recording_under_checkpointing,
    same_layout,
)
from segue.core.modes import Mode, SeamState, View, Watch, modes_of
from segue.core.tensor_files import fingerprint
from segue.core.withheld import TORCH_FLAGS, setting_of
from segue.errors import HandoverError, SegueError, StudentError
from segue.sites import Site
from segue.students.layers import layers_of


class Seam(nn.Module):
    """Stand at a site and blend: weight 0 is the teacher bit for bit, weight 1 the student."""

    is_segue_seam = True

    teacher: nn.Module | None
    student: nn.Module
    student_weight: Tensor  # not `weight`: that name belongs to the layers at a site
    student_mean: Tensor

    def __init__(self, teacher: nn.Module, student: nn.Module, site: Site, *, teacher_gradient: bool = False) -> None:
        super().__init__()
        self.teacher = teacher
        self.student = student
        self.site = site
        self.teacher_gradient = teacher_gradient
        self.reached: set[bool] = set()  # True after a training forward, False after an evaluation forward; eager code only
        self.blind = False  # a training forward has passed without gradients
        self.known_calls: set[tuple[Any, ...]] = set()  # the kinds of calls that were checked
        self.records: list[tuple[Tensor, ...]] = []  # per forward: (teacher, student), or the student alone
        device = next((p.device for p in (*teacher.parameters(), *student.parameters())), None)
        self.register_buffer("student_weight", torch.zeros((), dtype=torch.float32, device=device), persistent=False)
        self.register_buffer("student_mean", torch.zeros((), dtype=torch.float32, device=device), persistent=False)
        self.state = SeamState()
        self.configure()
        self.teacher_hash = fingerprint(teacher.state_dict())  # of the weights as they must stay; computed again after a cast

    def configure(self, **changes: Any) -> None:
        """Change fields of the state and decide the modes of the next forwards.

        Eager code reads the weight as a number, which needs no synchronisation and lets it leave a side out. Compiled code
        reads it from the buffers and takes modes that do not depend on it, so a moving weight never recompiles.
        """
        before, state = self.state, dataclasses.replace(self.state, **changes)
        self.state = state
        # autograd refuses a buffer written between forward and backward
        if (state.weight, state.mean) != (before.weight, before.mean):
            self._write_buffers()
        self.modes = modes_of(state, state.weight, state.mean, compared=state.compared or self.teacher is None)
        weight = 1.0 if state.closed_in_graph else None
        self.modes_in_graph = modes_of(state, weight, weight, compared=state.compared or state.closed_in_graph)

    def _write_buffers(self) -> None:
        with torch.no_grad():
            self.student_weight.fill_(self.state.weight)
            self.student_mean.fill_(self.state.mean)

    def set_weight(self, weight: float, mean: float) -> None:
        """Set the student's weight for this step and its mean."""
        self.configure(weight=weight, mean=mean)

    def release_teacher(self) -> nn.Module:
        """Drop the teacher for good and return it; the student stays alone."""
        teacher, self.teacher = self.require_teacher(), None
        self.configure(closed_in_graph=True)
        return teacher

    @property
    def closed(self) -> bool:
        """The teacher has no share left."""
        return self.state.weight == self.state.mean == 1.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mode, watch, weight = self._decide(args, kwargs)
        if mode is Mode.STUDENT:  # first: a closed seam costs next to nothing
            return self._student_alone(args, kwargs, watch)
        if mode is Mode.BLEND:
            return self._blend(args, kwargs, weight, watch)
        if mode is Mode.SKIP_STUDENT:
            return self._skip_student(args, kwargs)
        if mode is Mode.HOLD:
            return self._blend(args, kwargs, 0.0, watch, hold=True)
        if mode is Mode.COMPARE:
            return self._blend(args, kwargs, 1.0, watch)
        return self.require_teacher()(*args, **kwargs)

    def _decide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Mode, Watch, float | Tensor]:
        """Return what this forward does, what it records, and the student's weight."""
        gradients = torch.is_grad_enabled()
        if torch.compiler.is_compiling():
            return *self.modes_in_graph[self.training, gradients], self.student_weight if self.training else self.student_mean
        mode, watch = self.modes[self.training, gradients]
        if _fx._is_fx_tracing_flag or torch._C._get_tracing_state() is not None:
            self._refuse_tracing(mode, args, kwargs)
        self.reached.add(self.training)
        if self.training and not gradients and mode is not Mode.TEACHER:
            self.blind = True
        return mode, watch, self.state.weight if self.training else self.state.mean

    def _student_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any], watch: Watch) -> Any:
        output = self.student(*args, **kwargs) if self.closed else self.call_student(args, kwargs)
        if watch is not Watch.NOTHING:
            self._record(None, output, watch)
        return output

    def _refuse_tracing(self, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a graph without tensors, which cannot be blended, and one for training, whose weight would stand still."""
        alone = mode in (Mode.TEACHER, Mode.STUDENT) and (self.state.view is not View.BLEND or self.closed)
        symbolic = any(isinstance(x, torch.fx.Proxy) for x in (*args, *kwargs.values()))
        if not alone and (symbolic or (self.training and torch._C._get_tracing_state() is not None)):
            raise HandoverError(
                f"{'torch.fx.symbolic_trace' if symbolic else 'torch.jit.trace'} cannot trace a running handover.",
                f"Site {self.site.name!r} blends two sides, and the graph would not follow its weight.",
                "trace one side (with handover.as_student():) or the model after finalize_(); torch.compile and torch.export "
                "follow the weight.",
            )

    def _skip_student(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._needs_student():
            return self._blend(args, kwargs, 0.0, Watch.NOTHING, hold=True)
        return self._tied(self._call_teacher(args, kwargs))

    def _needs_student(self) -> bool:
        """Return whether a skipped student must run: if it is sharded, its forward gathers parameters for backward()."""
        return self.training and torch.is_grad_enabled() and is_sharded(self.student)

    def _blend(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], weight: float | Tensor, watch: Watch, hold: bool = False
    ) -> Any:
        return self._joined(*self._both(args, kwargs, hold), weight, watch, hold)

    def _joined(self, teacher: Any, student: Any, weight: float | Tensor, watch: Watch, hold: bool) -> Any:
        """Record two outputs and blend them; each comes with what the model captures inside."""
        recorded = watch is not Watch.NOTHING
        if recorded:
            self._record(teacher[0], student[0], watch)
            student = detached(student) if hold else student  # guidance alone teaches it: no graph through the model

        def join(t: Tensor, s: Tensor) -> Tensor:
            output = mix(t, s, weight)  # copied where it is a recorded tensor, which later code could change in place
            return output.clone() if recorded and (output is t or output is s) else output

        capture(merge(teacher[1], student[1], join, self.site, "captured outputs"))
        return merge(teacher[0], student[0], join, self.site)

    def _both(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], detach: bool, part: nn.Module | None = None
    ) -> tuple[Any, Any]:
        """Run the teacher, or a part of it, and the student on the same input; only the student writes to a cache.

        Each output comes with what the model captures inside.
        """
        for_teacher = fork_caches(args, kwargs)
        before = _versions(args, kwargs)
        with captured_outputs() as teachers:
            teacher = self._call_teacher(*for_teacher, part)
        if _versions(args, kwargs) != before:
            raise HandoverError(
                f"the teacher at site {self.site.name!r} changes its input in place.",
                "The student runs on the same input after it, and would see the changed values.",
                "switch in-place operations off (inplace=False), or choose a site that begins after them.",
            )
        if detach:
            args, kwargs = detached((args, kwargs))
        with captured_outputs() as students:
            student = self.call_student(args, kwargs)
        return (teacher, teachers if same_layout(teachers, students) else students), (student, students)

    def call_student(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the student; the first call of each kind is checked, which compiled code cannot do."""
        if torch.compiler.is_compiling() or (kind := kind_of_call(args, kwargs)) in self.known_calls:
            return self.student(*args, **kwargs)
        self.prove(args, kwargs)
        try:
            output = self.student(*args, **kwargs)
        except (SegueError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise cannot_be_called(self.site, error, "handover.cancel_() brings the original model back.") from error
        self.known_calls.add(kind)
        return output

    def prove(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let a student that reads its teacher's calls prove that it reads this one rightly."""
        prove = getattr(self.student, "prove", None)
        if prove is not None and self.teacher is not None and not is_sharded(self.teacher):
            prove(self.teacher, self.site, args, kwargs)

    def _call_teacher(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: nn.Module | None = None) -> Any:
        teacher = part or self.require_teacher()
        if self.teacher_gradient:
            return teacher(*args, **kwargs)
        with torch.no_grad():
            return teacher(*args, **kwargs)

    def _call_part(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a part of both sides for code outside the site, as diffusers' DiT does, and blend as the site is blended."""
        weight: float | Tensor = self.state.weight if self.training else self.state.mean
        modes = self.modes
        if torch.compiler.is_compiling():
            modes, weight = self.modes_in_graph, self.student_weight if self.training else self.student_mean
        mode, _ = modes[self.training, torch.is_grad_enabled()]
        student = self.student.get_submodule(name)
        if mode is Mode.STUDENT or mode is Mode.COMPARE:
            return student(*args, **kwargs)
        teacher = self._call_teacher(args, kwargs, layers_of(self.require_teacher())[0].get_submodule(name))
        if mode is not Mode.BLEND:
            return teacher
        return merge(teacher, student(*args, **kwargs), lambda t, s: mix(t, s, weight), self.site, f"output of {name!r}")

    def require_teacher(self) -> nn.Module:
        """Return the teacher, or raise if it has been released."""
        if self.teacher is None:
            raise HandoverError(
                f"the teacher at site {self.site.name!r} is not in memory.",
                "It is released at takeover, because the plan says release=True.",
                "plan with release=False to keep the teachers.",
            )
        return self.teacher

    def _record(self, teacher: Any, student: Any, watch: Watch) -> None:
        if torch.compiler.is_compiling():
            refuse_recording_under_checkpointing()
        elif torch._C._current_graph_task_id() != -1:
            return  # activation checkpointing recomputes this forward during backward; it was recorded the first time
        recorded = first_floating(student, self.site)
        if watch is Watch.PAIR:  # the teacher's output is a target: no loss may move it, even where its gradient passes
            self.records.append((first_floating(teacher, self.site).detach(), recorded))
        else:
            self.records.append((recorded,))

    def _tied(self, output: Any) -> Any:
        """Tie an output to the skipped student, with zero gradients, so that backward() and DDP find every parameter."""
        learning = self.training and torch.is_grad_enabled()
        parameters = [p for p in self.student.parameters() if p.requires_grad] if learning else []
        if not parameters:
            return output
        zero = _Zero.apply(*parameters)  # type: ignore[no-untyped-call]

        def tie(t: Tensor, _: Tensor) -> Tensor:
            return torch.where(t.new_ones((), dtype=torch.bool), t, zero.to(t)) if blendable(t) else t

        return merge(output, output, tie, self.site)

    def train(self, mode: bool = True) -> Seam:
        """Switch the student's mode; the teacher stays in evaluation."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Seam:
        """Keep the weight in float32 when the model is cast: bfloat16 rounds 101 weights in [0.9, 1] to 27."""
        before = self._teacher_dtypes()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.teacher is not None and self._teacher_dtypes() != before:
            self.teacher_hash = fingerprint(self.teacher.state_dict())
        self.student_weight, self.student_mean = self.student_weight.float(), self.student_mean.float()
        self._write_buffers()
        return self

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "records": []}  # a copy has no graph to wait for

    def _teacher_dtypes(self) -> list[torch.dtype]:
        return [] if self.teacher is None else [tensor.dtype for tensor in self.teacher.state_dict().values()]

    def __getattr__(self, name: str) -> Any:
        """Answer for plain settings (`num_heads`, `batch_first`) as the student will after the handover.

        Weights and submodules are withheld: code that uses them would bypass the seam unnoticed.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if (name.startswith("_") and name not in TORCH_FLAGS) or "student" not in modules:
                raise
            return self._setting(name)

    def require_complete(self) -> None:
        """Refuse a forward of the model that did not call all of the site: one module is always complete."""

    def _setting(self, name: str) -> Any:
        try:
            return setting_of(self.student, name, self.site.name, self._call_part)
        except AttributeError:
            if self.teacher is None or not hasattr(layers_of(self.teacher)[0], name):
                raise
            raise AttributeError(
                f"the code around site {self.site.name!r} reads {name!r}, which the teacher has and the student lacks. "
                "Hint: give the student that attribute."
            ) from None

    def extra_repr(self) -> str:
        state = self.state
        return f"site={self.site.name!r}, weight={state.weight:.4g}, view={state.view.value}, closed={self.closed}"


class _Zero(torch.autograd.Function):
    """A zero that depends on parameters, with zero gradients."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def kind_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells one way of calling a module from another: which arguments, of what type, tensors with how many axes."""
    named = (*enumerate(args), *kwargs.items())
    return tuple(
        (name, (x.dim(), x.dtype) if isinstance(x, Tensor) else x if isinstance(x, bool) else type(x)) for name, x in named
    )


def cannot_be_called(site: Site, error: Exception, hint: str) -> StudentError:
    """Make the error of a student that raises where its teacher works."""
    return StudentError(
        f"the student at site {site.name!r} cannot be called as its teacher is called.",
        f"It raises {type(error).__name__}: {error}",
        f"give it the teacher's signature. {hint}",
    )


def _versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return []
    return [x._version for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not x.is_inference()]


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP2 shards a module."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in module.parameters())
