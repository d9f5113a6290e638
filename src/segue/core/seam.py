"""The seam: where teacher and student share the work at one site.

It knows nothing of gates, schedules or methods: it holds a teacher, a student and one number, the student's weight, and blends
every floating tensor that the two return. The handover writes that number once a step and sets the flags below.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from segue.core.blending import detached, first_floating, fork_caches, merge, mix
from segue.core.captured_outputs import record, same_layout, taken_aside
from segue.core.graphs import refuse_recording_under_checkpointing
from segue.core.tensor_files import fingerprint
from segue.errors import HandoverError
from segue.sites import Site


class View(Enum):
    """Which side a forward shows."""

    BLEND = "blend"
    TEACHER = "teacher"
    STUDENT = "student"


class Watch(Enum):
    """Which outputs a forward keeps for the losses and measures outside the model."""

    NOTHING = "nothing"
    PAIR = "pair"  # evaluates both sides, whatever the weight says
    STUDENT = "student"


class Seam(nn.Module):
    """Stand at a site and blend: weight 0 is the teacher bit for bit, weight 1 the student."""

    is_segue_seam = True

    teacher: nn.Module | None
    student: nn.Module
    student_weight: Tensor  # for this step, in training (not `weight`: that name belongs to the layers we stand in for)
    student_mean: Tensor  # its mean over the gate's noise, in evaluation

    def __init__(self, teacher: nn.Module, student: nn.Module, site: Site, *, teacher_gradient: bool = False) -> None:
        super().__init__()
        self.teacher = teacher
        self.student = student
        self.site = site
        self.teacher_gradient = teacher_gradient
        self.view = View.BLEND
        self.watch = Watch.NOTHING
        self.hold = False  # the teacher's output flows on; the student, its input detached, learns from guidance alone
        self.closed = False  # alpha is 0: the teacher is not computed
        self.closed_in_graph = False  # the same for compiled code, switched for groups of sites at a time
        self.may_skip = False  # both sides have run once and were compared, so one may be left out
        self.measuring = False  # watch in evaluation too
        self.reached: set[bool] = set()  # the modes (training or not) in which a forward came by; eager code only
        self.blind = False  # a training forward came by without gradients
        self.records: list[tuple[Tensor, ...]] = []
        device = next((p.device for p in (*teacher.parameters(), *student.parameters())), None)
        self.register_buffer("student_weight", torch.zeros((), dtype=torch.float32, device=device), persistent=False)
        self.register_buffer("student_mean", torch.zeros((), dtype=torch.float32, device=device), persistent=False)
        self.set_weight(0.0, 0.0)
        self.teacher_hash = fingerprint(teacher.state_dict())  # of the weights as they must stay, anew after a cast

    def set_weight(self, weight: float, mean: float) -> None:
        """Set the student's weight for this step and its mean.

        Eager code reads the Python numbers, which costs no synchronisation and lets it leave a side out; compiled code
        reads the buffers, so that a moving weight never recompiles.
        """
        self.weight_now, self.mean_now = weight, mean
        with torch.no_grad():
            self.student_weight.fill_(weight)
            self.student_mean.fill_(mean)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self.reached.add(self.training)
        if self.view is View.TEACHER:
            return self._present_teacher()(*args, **kwargs)
        watched = self.watch is not Watch.NOTHING and self._watching(compiling)
        pair = watched and self.watch is Watch.PAIR
        if self.view is View.STUDENT or (not self.hold and (self.closed_in_graph if compiling else self.closed)):
            unchecked = not compiling and self.view is View.BLEND and self.teacher is not None and not self.may_skip
            if not (pair or unchecked):
                return self._student_alone(args, kwargs, watched)
            return self._joined(*self._both(args, kwargs), 1.0, watched)
        if self.hold:
            learns = self.training and torch.is_grad_enabled()
            if not watched and (not learns or self._may_leave_out_student()):
                return self._anchored(self._call_teacher(args, kwargs))
            return self._joined(*self._both(args, kwargs, detach=True), 0.0, watched, tied=not watched)
        if compiling:
            weight: float | Tensor = self.student_weight if self.training else self.student_mean
        else:
            weight = self.weight_now if self.training else self.mean_now
            if self.may_skip and weight == 1.0 and not pair:
                return self._student_alone(args, kwargs, watched)
            if weight == 0.0 and not watched and self._may_leave_out_student():
                return self._anchored(self._call_teacher(args, kwargs))
        return self._joined(*self._both(args, kwargs), weight, watched)

    def _may_leave_out_student(self) -> bool:
        return self.may_skip and not _is_sharded(self.student)

    def _joined(self, teacher: Any, student: Any, weight: float | Tensor, watched: bool, tied: bool = True) -> Any:
        """Blend what `_both` returned; untied, a student without weight leaves no trace in the graph."""
        if watched:
            self._record(teacher[0], student[0])
        if not tied:
            student = detached(student)

        def join(t: Tensor, s: Tensor) -> Tensor:
            return _own(mix(t, s, weight), (t, s), watched)

        record(merge(teacher[1], student[1], join, self.site, "records"))
        return merge(teacher[0], student[0], join, self.site)

    def _student_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any], watched: bool) -> Any:
        output = self.student(*args, **kwargs)
        if watched:
            self._record(None, output)
        return output

    def _both(self, args: tuple[Any, ...], kwargs: dict[str, Any], detach: bool = False) -> tuple[Any, Any]:
        """Evaluate the two sides on the same input, each with its side records; only the student writes to a cache."""
        for_teacher = fork_caches(args, kwargs)
        before = _versions(args, kwargs)
        with taken_aside() as teachers:
            teacher = self._call_teacher(*for_teacher)
        if _versions(args, kwargs) != before:
            raise HandoverError(
                f"teacher and student were to be evaluated on the same input at site {self.site.name!r}.",
                "The teacher changed its input in place, so the student would see something else.",
                "switch in-place operations off (inplace=False), or choose a site that begins after them.",
            )
        if detach:
            args, kwargs = detached((args, kwargs))
        with taken_aside() as students:
            student = self.student(*args, **kwargs)
        return (teacher, teachers if same_layout(teachers, students) else students), (student, students)

    def _call_teacher(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        teacher = self._present_teacher()
        if self.teacher_gradient:
            return teacher(*args, **kwargs)
        with torch.no_grad():
            return teacher(*args, **kwargs)

    def _present_teacher(self) -> nn.Module:
        if self.teacher is None:
            raise HandoverError(
                f"the teacher at site {self.site.name!r} was asked for.",
                "It was released from memory at takeover, as the plan says (release=True).",
                "plan with release=False to keep the teachers.",
            )
        return self.teacher

    def _watching(self, compiling: bool) -> bool:
        if self.measuring:
            return True
        if not self.training:
            return False
        if not torch.is_grad_enabled():
            if not compiling:
                self.blind = True
            return False
        return True

    def _record(self, teacher: Any, student: Any) -> None:
        if torch.compiler.is_compiling():
            refuse_recording_under_checkpointing()
        elif torch._C._current_graph_task_id() != -1:
            return  # activation checkpointing recomputes this forward during backward; it was recorded the first time
        kept = first_floating(student, self.site)
        # the teacher's output is a target: no loss may move it, not even where the gradient passes the teacher
        pair = self.watch is Watch.PAIR
        self.records.append((first_floating(teacher, self.site).detach(), kept) if pair else (kept,))

    def _anchored(self, output: Any) -> Any:
        """Tie an output to the student it left out, with zero gradients, so that backward() and DDP find every parameter."""
        if not (self.training and torch.is_grad_enabled()):
            return output
        parameters = [p for p in self.student.parameters() if p.requires_grad]
        if not parameters:
            return output
        zero = _Zero.apply(*parameters)  # type: ignore[no-untyped-call]

        def tie(t: Tensor, _: Tensor) -> Tensor:
            return torch.where(t.new_ones((), dtype=torch.bool), t, zero.to(t)) if t.is_floating_point() else t

        return merge(output, output, tie, self.site)

    def train(self, mode: bool = True) -> Seam:
        """Switch the student's mode; the teacher stays in evaluation."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Seam:
        """Keep the weight in float32 when the model is cast: bfloat16 knows only 27 numbers in [0.9, 1]."""
        before = self._teacher_dtypes()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.teacher is not None and self._teacher_dtypes() != before:
            self.teacher_hash = fingerprint(self.teacher.state_dict())
        self.student_weight, self.student_mean = self.student_weight.float(), self.student_mean.float()
        self.set_weight(self.weight_now, self.mean_now)
        return self

    def _teacher_dtypes(self) -> list[torch.dtype]:
        return [] if self.teacher is None else [tensor.dtype for tensor in self.teacher.state_dict().values()]

    def __getattr__(self, name: str) -> Any:
        """Answer for plain settings (`num_heads`, `batch_first`) as the student will after the handover.

        Weights and submodules are withheld: code that reached for them would bypass the seam without a word.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if (name.startswith("_") and name not in _TORCH_FLAGS) or "student" not in modules:
                raise
            value = self._setting(name)
            if isinstance(value, Tensor | nn.Module):
                return Withheld(f"{self.site.name}.{name}")
            if callable(value) and getattr(value, "__self__", None) is modules["student"]:
                raise
            return value

    def _setting(self, name: str) -> Any:
        try:
            return getattr(self.student, name)
        except AttributeError:
            if self.teacher is None or not hasattr(self.teacher, name):
                raise
            raise AttributeError(
                f"the code around site {self.site.name!r} reads {name!r}, which the teacher has and the student lacks. "
                "Hint: give the student that attribute."
            ) from None

    def extra_repr(self) -> str:
        return f"site={self.site.name!r}, weight={self.weight_now:.4g}, view={self.view.value}, closed={self.closed}"


# What nn.TransformerEncoder asks of its attention before it considers the fast path.
_TORCH_FLAGS = ("_qkv_same_embed_dim",)


class Withheld:
    """Stand for a weight behind a seam; refuses to be used."""

    requires_grad = True

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Withheld:
        if name.startswith("__"):
            raise AttributeError(name)
        return Withheld(f"{self.name}.{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = next((x.name for x in (*args, *(kwargs or {}).values()) if isinstance(x, Withheld)), "?")
        raise HandoverError(
            f"the weights {name!r} were used from outside their site.",
            "Teacher and student share that place, so using one side's weights would bypass the handover.",
            "choose a site that contains the code which uses them.",
        )


class _Zero(torch.autograd.Function):
    """A zero that depends on parameters, with zero gradients."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def _own(output: Tensor, sides: tuple[Tensor, ...], recorded: bool) -> Tensor:
    """Hand on a copy where the output is a recorded tensor, which later code could change in place."""
    return output.clone() if recorded and any(output is side for side in sides) else output


def _versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return []
    return [x._version for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not x.is_inference()]


def _is_sharded(module: nn.Module) -> bool:
    """Tell whether FSDP2 holds a module: it must then run on every rank, because its forward gathers its parameters."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in module.parameters())
