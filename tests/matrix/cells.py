"""One cell of the matrix: an entry, a student, and what became of the attempt to hand one over to the other."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import segue
from segue import students
from segue.errors import SegueError
from segue.sites import Pattern
from tests.matrix.entries import Entry
from tests.matrix.proofs import SAME, Reads, SilentlyWrongError, call, difference, generated, outputs, require_close

WORKS = "works"
IGNORES = "works with ignore"
REFUSED = "refused"
ABSENT = "not applicable"
CRASHED = "crashed"
WRONG = "silently wrong"
OUTCOMES = (WORKS, IGNORES, REFUSED, ABSENT, CRASHED, WRONG)
BAD = (CRASHED, WRONG)

# a refusal counts only where a user can still do without: when the student is made, at the first call of a kind, or at the end
MAY_REFUSE = ("replace_", "first forward", "generation", "finalize_")
OFFERED = re.compile(r"ignore=\(([^)]*)\)")
UNLIKE_ITS_CONFIGURATION = "cannot be rebuilt from its configuration"  # what a warning of replace_ says about a span
ROUNDS = 4  # how often a student is tried again with what the refusal offers to ignore


@dataclass(frozen=True)
class Student:
    """A student factory, where it goes, and which variants of it must equal their teacher."""

    name: str
    place: str  # attention, mlp, norm, activation, span, any
    make: Callable[[list[nn.Module]], Any]  # of the teachers
    equal: Callable[[list[nn.Module]], Any] | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the plan


def smaller_sides(teachers: list[nn.Module]) -> set[int]:
    """Return the possible ranks of the linear layers."""
    parts = [part for teacher in teachers for part in teacher.modules()]
    return {min(part.weight.shape) for part in parts if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"}


def narrow_inside(teacher: nn.Module, site: Any) -> nn.Module:
    """A user's own student, of half the width."""
    return nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))


OPERATORS = {
    "Softmax": students.Softmax(),
    "LinearAttention": students.LinearAttention(),
    "GatedLinear": students.GatedLinear(),
    "GatedDeltaNet": students.GatedDeltaNet(),
    "SlidingWindow": students.SlidingWindow(window=3),
    "WindowedLinear": students.WindowedLinear(window=3),
    "Performer": students.Performer(features=16),
    "Nystrom": students.Nystrom(landmarks=4),
    "Linformer": students.Linformer(rank=4, tokens=64),
    "Fourier": students.Fourier(),
}
WIDE_WINDOW = students.SlidingWindow(window=64)  # all tokens: equals its teacher

STUDENTS = [
    Student("Reinit", "any", lambda _: students.Reinit()),
    *(Student(name, "attention", lambda _, made=made: made) for name, made in OPERATORS.items()),
    Student(
        "LowRankMlp",
        "linear",
        lambda teachers: students.LowRankMlp(rank=max(1, min(smaller_sides(teachers), default=2) // 2)),
        lambda teachers: students.LowRankMlp(rank=min(found)) if len(found := smaller_sides(teachers)) == 1 else None,
    ),
    Student("NarrowMlp", "mlp", lambda _: students.NarrowMlp(ratio=0.5), lambda _: students.NarrowMlp(ratio=1)),
    Student("WideMlp", "mlp", lambda _: students.WideMlp(ratio=2), lambda _: students.WideMlp(ratio=2)),
    Student("GatedMlp", "mlp", lambda _: students.GatedMlp()),
    Student("Adapter", "mlp", lambda _: narrow_inside, settings={"adapter": students.Adapter(inside=16)}),
    Student("RmsNorm", "norm", lambda _: students.RmsNorm(), settings={"train": "all"}),
    Student("ActivationSwap", "activation", lambda _: students.ActivationSwap(to="relu"), settings={"train": "all"}),
    Student("Span, OneLayer", "span", lambda _: students.OneLayer()),
    Student("Span, Reinit", "span", lambda _: students.Reinit()),
]
PARTIAL = ("Reinit", *OPERATORS)  # what is tried on another part of a model that has an entry already


def sites_of(entry: Entry, place: str) -> Pattern | None:
    """Return where in a model a kind of student goes, or None."""
    blocks = entry.layers if entry.blocks is None else entry.blocks
    every = None if entry.layers is None else f"{entry.layers}.*"
    if place in ("attention", "mlp"):
        return getattr(entry, place)
    if place == "any":
        return entry.attention or entry.mlp or every
    if place == "linear":
        return entry.mlp or every
    if place == "span":
        return None if entry.layers is None else segue.Span(entry.layers, every=2)
    fits = is_layer_norm if place == "norm" else is_activation
    if blocks is None or not any(name.startswith(blocks) and fits(m) for name, m in entry.model().named_modules()):
        return None
    return lambda name, module: name.startswith(blocks) and fits(module)


def is_layer_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm)


def is_activation(module: nn.Module) -> bool:
    ours = type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations", "timm.layers.activations")
    return ours and not isinstance(module, nn.MultiheadAttention | nn.Softmax)


class Trials:
    """The cells of one entry, with what is known of the untouched model."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        if entry.teach is not None:
            entry.teach()
        self.stage = "untouched model"
        self._proof: tuple[str, str] | None = None
        self._untouched: dict[int, Tensor] = {}
        self._reads: Reads | None = None
        self._generates: bool | None = None
        self._saved: bool | None = None
        self._listed = False
        self._model: nn.Module
        self._handover: segue.Handover

    def run(self, student: Student) -> dict[str, Any]:
        """Try a student, and return the outcome, what was said, and at which stage."""
        absent = sites_of(self.entry, student.place) is None or (self.entry.part and student.name not in PARTIAL)
        if absent:
            return {"outcome": ABSENT}
        ignored: tuple[str, ...] = ()
        for _ in range(ROUNDS):
            found = self._run(student, ignored)
            offered = OFFERED.search(found["detail"]) if found["outcome"] == REFUSED else None
            more = tuple(re.findall(r"\w+", offered[1])) if offered else ()
            if not set(more) - set(ignored):
                break
            ignored = (*ignored, *(name for name in more if name not in ignored))
        if found["outcome"] == WORKS and ignored:
            return {**found, "outcome": IGNORES, "detail": f"ignore={ignored}"}
        return found

    def _run(self, student: Student, ignored: tuple[str, ...]) -> dict[str, Any]:
        self.stage = "untouched model"
        try:
            note = self._hand_over(student, ignored)
        except (SegueError, AttributeError) as error:
            if isinstance(error, AttributeError) and "Hint:" not in str(error):  # Python wants this kind from a seam
                return self._crash(error)
            if self.stage in MAY_REFUSE:
                return self._left_alone() or {"outcome": REFUSED, "stage": self.stage, "detail": str(error)}
            return {"outcome": CRASHED, "stage": self.stage, "detail": f"{type(error).__name__}: {error}"}
        except SilentlyWrongError as error:
            return {"outcome": WRONG, "stage": self.stage, "detail": str(error)}
        except Exception as error:
            return self._crash(error)
        return {"outcome": WORKS, "detail": note}

    def _crash(self, error: Exception) -> dict[str, Any]:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{'/'.join(place.filename.split('/')[-2:])}:{place.lineno}"
        return {"outcome": CRASHED, "stage": self.stage, "detail": f"{type(error).__name__}: {error} ({where})"}

    def _left_alone(self) -> dict[str, Any] | None:
        """Check that a refusal leaves the model as it was, or brings it back on request."""
        if self.stage not in ("replace_", "first forward"):
            return None
        try:
            if self.stage == "first forward":
                self._handover.cancel_()
            off = difference(outputs(self._model, self.entry.batch()), self.untouched(self._layers))
        except Exception as error:
            return {"outcome": CRASHED, "stage": "after a refusal", "detail": f"{type(error).__name__}: {error}"}
        return {"outcome": WRONG, "stage": self.stage, "detail": "the refusal has changed the model"} if off else None

    def untouched(self, layers: int) -> Tensor:
        if layers not in self._untouched:
            self._untouched[layers] = outputs(self.entry.model(layers), self.entry.batch())
            if not self._untouched[layers].isfinite().all():
                raise ValueError("the untouched model returns values that are not finite")
        return self._untouched[layers]

    def _require_untouched(self, found: Tensor, what: str) -> None:
        """Require the bits of the untouched model: as it is, or frozen, for which torch takes another path."""
        expected = self.untouched(self._layers)
        if not torch.equal(found, expected):
            expected = outputs(self.entry.model(self._layers).requires_grad_(False), self.entry.batch())
            require_close(found, expected, f"{what} is not the untouched model", most=0)

    def _replace(self, model: nn.Module, student: Student, factory: Any) -> segue.Handover:
        sites = sites_of(self.entry, student.place)
        plan = segue.Plan(sites=sites, student=factory, schedule=segue.schedules.Linear(), **student.settings)
        self.stage, self._model = "replace_", model
        self._layers = 4 if student.place == "span" else 2
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._handover = segue.replace_(model, plan, total_steps=2)
        self._listed = any(UNLIKE_ITS_CONFIGURATION in str(warning.message) for warning in caught)
        return self._handover

    def _as_student(self, model: nn.Module, handover: segue.Handover) -> Tensor:
        self.stage = "first forward"
        with handover.as_student():
            return outputs(model, self.entry.batch())

    def _hand_over(self, student: Student, ignored: tuple[str, ...]) -> str:
        layers = 4 if student.place == "span" else 2
        expected, batch = self.untouched(layers), self.entry.batch()
        model = self.entry.model(layers)
        teachers = [model.get_submodule(site.name) for site in segue.select(model, sites_of(self.entry, student.place))]
        if student.equal is not None and (factory := student.equal(teachers)) is not None:
            self._require_equal(student, factory)
        factory = student.make(teachers)
        if ignored:
            factory = dataclasses.replace(factory, ignore=ignored)
        handover = self._replace(model, student, factory)
        listed = self._listed
        self.stage = "first forward"
        before = outputs(model, batch)
        alone = self._as_student(model, handover)
        if alone.shape != expected.shape or not alone.isfinite().all():
            raise SilentlyWrongError(f"the student's output has shape {tuple(alone.shape)}, or is not finite")
        note = self._read_rightly(student) if student.place == "attention" else ""
        self.stage = "teacher's view"
        with handover.as_teacher():
            self._require_untouched(outputs(model, batch), "the teacher's view")
        self._require_untouched(before, "at weight 0 the model")
        self._train(model, handover)
        self._finish(model, handover)
        self._reload(model, student, factory, layers, listed)
        if student.place != "span":
            self.stage = "what it reads"
            self._teacher_reads().require(Reads(self.entry, model), order=not ignored)
        self._generate(model)
        return "a warning says that save_pretrained cannot rebuild it" if listed else note

    def _require_equal(self, student: Student, factory: Any) -> None:
        model = self.entry.model()
        handover = self._replace(model, student, factory)
        alone = self._as_student(model, handover)
        self.stage = "equality"
        require_close(alone, self.untouched(2), f"{factory!r} does not equal its teacher")

    def _read_rightly(self, student: Student) -> str:
        """Prove that Segue reads the attention: softmax, or a window over all tokens, with copied weights is the teacher."""
        if self._proof is None:
            self._proof = ("unproved", "")
            for factory in (students.Softmax(), WIDE_WINDOW):
                model = self.entry.model()
                try:
                    found = self._as_student(model, self._replace(model, student, factory))
                except SegueError as error:
                    self._proof = ("unproved", str(error))
                    continue
                off = difference(found, self.untouched(2))
                self._proof = ("differs" if off > 1e-3 else "proved", f"{type(factory).__name__}() is off by {off:.2g}")
                break
        self.stage = "equality"
        verdict, said = self._proof
        if verdict == "differs":
            raise SilentlyWrongError(f"the teacher is misread: {said}")
        return "" if verdict == "proved" else "no operator here equals the teacher"

    def _train(self, model: nn.Module, handover: segue.Handover) -> None:
        self.stage = "training"
        handover.step()  # the student's weight is now 0.5
        optimizer = torch.optim.SGD(handover.parameters(), lr=1e-2)
        loss = call(model.train(), self.entry.batch()).float().square().mean() + handover.aux_loss()
        loss.backward()
        grads = [p.grad for p in handover.parameters() if p.grad is not None]
        if not all(grad.isfinite().all() for grad in grads) or not any(grad.any() for grad in grads):
            raise SilentlyWrongError("the gradient at weight 0.5 is zero or not finite")
        torch.nn.utils.clip_grad_norm_(list(handover.parameters()), 1.0)
        optimizer.step()
        handover.step()  # takeover

    def _finish(self, model: nn.Module, handover: segue.Handover) -> None:
        self.stage = "takeover"
        before = outputs(model, self.entry.batch())
        self.stage = "finalize_"
        try:
            handover.finalize_()
        except Exception:
            require_close(outputs(model, self.entry.batch()), before, "finalize_ fails and the model has changed", most=SAME)
            raise
        self.stage = "finalized model"
        require_close(outputs(model, self.entry.batch()), before, "the finalized model is not what was trained", most=SAME)

    def _reload(self, model: nn.Module, student: Student, factory: Any, layers: int, listed: bool) -> None:
        expected, batch = outputs(model, self.entry.batch()), self.entry.batch()
        given = {"student": factory} if factory is narrow_inside else {}
        with tempfile.TemporaryDirectory() as folder:
            self.stage = "save and load_"
            segue.save(model, folder)
            again = segue.load_(self.entry.model(layers), folder, **given)
            require_close(outputs(again, batch), expected, "the reloaded model differs", most=0)
        if student.place == "span" and hasattr(model, "save_pretrained") and self._saves() and not listed:
            self.stage = "save_pretrained"
            require_close(self._from_pretrained(model), expected, "from_pretrained returns another model", most=SAME)

    def _from_pretrained(self, model: nn.Module) -> Tensor:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return outputs(type(model).from_pretrained(folder), self.entry.batch())

    def _saves(self) -> bool:
        """Return whether the package itself restores the untouched model: not where it computes a table again."""
        if self._saved is None:
            self._saved = difference(self._from_pretrained(self.entry.model()), self.untouched(2)) <= SAME
        return self._saved

    def _teacher_reads(self) -> Reads:
        if self._reads is None:
            self._reads = Reads(self.entry, self.entry.model())
            if self._reads.future > 1e-3:
                raise ValueError("the untouched model reads the future")
        return self._reads

    def _generate(self, model: nn.Module) -> None:
        if not self.entry.generates:
            return
        if self._generates is None:
            self.stage = "the untouched model's generation"
            plain = self.entry.model()
            self._generates = torch.equal(*(generated(self.entry, plain, cached=cached) for cached in (False, True)))
        if not self._generates:
            return
        self.stage = "generation"
        without, having = (generated(self.entry, model, cached=cached) for cached in (False, True))
        if not torch.equal(without, having):
            raise SilentlyWrongError("generation with a cache gives other tokens than without")
