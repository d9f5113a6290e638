"""Building: make the students of a plan, check them, and try them on an example, before the model changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from segue.core.backbone import evaluating, plain_attention
from segue.core.blending import call_arguments, calling, captured_outputs, merge
from segue.core.seam import cannot_be_called
from segue.core.span import Forward, changed_between, hand_out, hands_on
from segue.core.surgery import finished_in_place, teacher_at, unreached
from segue.errors import StudentError
from segue.plan import Plan
from segue.sites import Site
from segue.students.attention.cache_copy import copy_caches


def build_students(model: nn.Module, plan: Plan, sites: list[Site]) -> dict[str, nn.Module]:
    """Make one student per site, with random numbers that depend on the plan's seed and the site alone."""
    students: dict[str, nn.Module] = {}
    cuda = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=cuda):
        for site in sites:
            teacher = teacher_at(model, site)
            digest = hashlib.blake2b(f"{plan.seed}/{site.name}".encode(), digest_size=7).digest()
            torch.manual_seed(int.from_bytes(digest, "big"))
            student = plan.student(teacher, site)
            if plan.adapter is not None and isinstance(student, nn.Module):
                student = plan.adapter(student, teacher, site)
            _check_student(student, teacher, site, model)
            students[site.name] = student
    return students


def _check_student(student: object, teacher: nn.Module, site: Site, model: nn.Module) -> None:
    fault = f"the student factory must return a new module for site {site.name!r}."
    if not isinstance(student, nn.Module):
        hint = "return the module itself: fn(teacher, site) -> module. Nothing was changed."
        raise StudentError(fault, f"It returns {type(student).__name__}, which is not an nn.Module.", hint)
    taken = {id(p): name for name, p in model.named_parameters()}
    shared = [taken[id(p)] for p in student.parameters() if id(p) in taken]
    if student is teacher or shared:
        what = "the teacher itself" if student is teacher else f"a module that shares {shared[0]!r} with the model"
        hint = "copy what you reuse (copy.deepcopy), because the teacher stays frozen. Nothing was changed."
        raise StudentError(fault, f"It returns {what}.", hint)
    places = {p.device for p in teacher.parameters()}
    stray = next((p.device for p in student.parameters() if places and p.device not in places), None)
    if stray is not None:
        hint = "build the student on the teacher's device: student.to(device). Nothing was changed."
        raise StudentError(fault, f"Its module is on {stray}, the teacher on {', '.join(map(str, places))}.", hint)


def try_students(model: nn.Module, sites: list[Site], students: dict[str, nn.Module], example: Any) -> None:
    """Run the unchanged model once on an example, and each student on the input of its teacher."""
    answers: dict[str, list[Any]] = {site.name: [] for site in sites}
    calls: list[tuple[Site, nn.Module, tuple[Any, ...], dict[str, Any]]] = []

    def ask(site: Site) -> Callable[..., None]:
        def before(teacher: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            args, kwargs = copy_caches(args, kwargs)
            try:
                with evaluating(students[site.name]), captured_outputs():  # the model must not take them for its own
                    answers[site.name].append(students[site.name](*args, **kwargs))
            except Exception as error:
                raise cannot_be_called(site, error, "Nothing was changed.") from error
            calls.append((site, teacher, args, kwargs))

        return before

    def compare(site: Site) -> Callable[..., None]:
        def after(teacher: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            merge(output, answers[site.name][-1], lambda t, _: t, site)

        return after

    args, kwargs = call_arguments(example)
    handles = []
    for site in sites:
        first, last = model.get_submodule(site.members[0]), model.get_submodule(site.members[-1])
        handles.append(first.register_forward_pre_hook(ask(site), with_kwargs=True))
        handles.append(last.register_forward_hook(compare(site)))
        handles += _follow_layers(model, site)
    try:
        with calling("example"), evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=[]), plain_attention():
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    for site, teacher, args, kwargs in calls:
        if not site.is_span and (prove := getattr(students[site.name], "prove", None)) is not None:
            prove(teacher, site, args, kwargs)
    for name, given in answers.items():
        if not given:
            raise unreached(name)
    if any(site.is_span for site in sites):
        _try_finished(model, sites, students, example)


def _try_finished(model: nn.Module, sites: list[Site], students: dict[str, nn.Module], example: Any) -> None:
    """Call the model as it will be, with fewer layers."""
    args, kwargs = call_arguments(example)
    try:
        with finished_in_place(model, sites, students), torch.no_grad(), torch.random.fork_rng(devices=[]), plain_attention():
            model.eval()
            model(*args, **kwargs)
    except Exception as error:
        raise StudentError(
            f"the shorter {type(model).__name__} cannot be called with the example.",
            f"It raises {type(error).__name__}: {error}",
            "choose spans that leave what the model needs (first=, last=, every=). Nothing was changed.",
        ) from error


def _follow_layers(model: nn.Module, site: Site) -> list[RemovableHandle]:
    """Refuse a model that changes the hidden state between the layers of a span."""
    run = Forward(site)
    handles = []

    def hear(place: int) -> Callable[..., None]:
        def before(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not hands_on(run, args, kwargs):
                raise changed_between(site, place)

        return before

    def after(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        hand_out(run, output, args, kwargs)

    for place, name in enumerate(site.members if site.is_span else ()):
        layer = model.get_submodule(name)
        handles.append(layer.register_forward_hook(after, with_kwargs=True))
        if place:
            handles.append(layer.register_forward_pre_hook(hear(place), with_kwargs=True))
    return handles
