"""Surgery: build students, try them, put modules in place, and put everything back.

Every check comes before the first change, and whatever was changed is recorded so that it can be restored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from segue.core.blending import copy_caches, merge
from segue.errors import HandoverError, StudentError
from segue.plan import Plan
from segue.sites import Site, is_seam
from segue.students.layers import Chain, Passthrough


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Place a module at a dotted name."""
    parent, _, leaf = name.rpartition(".")
    place = model.get_submodule(parent)
    getattr(place, "_orig_mod", place).register_module(leaf, module)  # torch.compile(part) wraps it


def teacher_at(model: nn.Module, site: Site) -> nn.Module:
    """Return the original at a site: its module, or the chain of a span's layers."""
    if not site.is_span:
        return model.get_submodule(site.name)
    return Chain([model.get_submodule(name) for name in site.members])


def put_in_place(model: nn.Module, site: Site, module: nn.Module, teacher: nn.Module) -> None:
    """Place a module at a site; behind a span's first layer, the others hand on what comes."""
    for name in site.names:
        put(model, name, module)
    if isinstance(teacher, Chain):
        for name in site.members[1:]:
            put(model, name, Passthrough(teacher.in_tuples))


def finished(student: nn.Module) -> nn.Module:
    """Return what stays of a student when the handover ends: itself, unless it says otherwise (adapters fold)."""
    finish = getattr(student, "finished", None)
    left = finish() if callable(finish) else student
    assert isinstance(left, nn.Module)
    return left.train(student.training)


def put_back(model: nn.Module, site: Site, teacher: nn.Module) -> None:
    """Place the original at its site again."""
    for name in site.names:
        put(model, name, teacher)
    if isinstance(teacher, Chain):
        for name, layer in zip(site.members, teacher.layers, strict=True):
            put(model, name, layer)


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse what is not the model itself: the wrapper would keep the old parameters or graphs."""
    if not isinstance(model, nn.Module):
        raise HandoverError(
            "replace_ was asked to change a model.", f"It was given {type(model).__name__}.", "give the nn.Module itself."
        )
    kinds = {cls.__name__ for cls in type(model).__mro__}
    wrappers = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "OptimizedModule")
    wrapper = next((name for name in wrappers if name in kinds), None)
    if wrapper is not None:
        raise HandoverError(
            f"replace_ was asked to change a model that is already wrapped by {wrapper}.",
            "The wrapper holds on to the parameters that are about to be replaced.",
            "call replace_ on the plain model first, then wrap, shard or compile it. Nothing was changed.",
        )


def refuse_running(model: nn.Module) -> None:
    """Refuse a second handover in one model: it would freeze the students of the first."""
    running = next((name for name, module in model.named_modules() if is_seam(module)), None)
    if running is not None:
        raise HandoverError(
            "replace_ was asked to start a handover.",
            f"Another one is running in this model, at {running!r} among others.",
            "name all sites in one plan (PerSite gives them schedules of their own), or finish the first.",
        )


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
    asked = f"the student factory was asked for a student at site {site.name!r}."
    if not isinstance(student, nn.Module):
        hint = "return the module itself: fn(teacher, site) -> module. Nothing was changed."
        raise StudentError(asked, f"It returned {type(student).__name__}, which is not an nn.Module.", hint)
    taken = {id(p): name for name, p in model.named_parameters()}
    shared = [taken[id(p)] for p in student.parameters() if id(p) in taken]
    if student is teacher or shared:
        what = "the teacher itself" if student is teacher else f"a module that shares {shared[0]!r} with the model"
        hint = "copy what you take over (copy.deepcopy), because the teacher stays frozen. Nothing was changed."
        raise StudentError(asked, f"It returned {what}.", hint)
    places = {p.device for p in teacher.parameters()}
    stray = next((p.device for p in student.parameters() if places and p.device not in places), None)
    if stray is not None:
        hint = "build the student on the teacher's device: student.to(device). Nothing was changed."
        raise StudentError(asked, f"It lives on {stray}, its teacher on {', '.join(map(str, places))}.", hint)


def try_students(model: nn.Module, sites: list[Site], students: dict[str, nn.Module], example: Any) -> None:
    """Run the untouched model once on an example and each student on what its teacher sees."""
    answers: dict[str, list[Any]] = {site.name: [] for site in sites}

    def ask(site: Site) -> Callable[..., None]:
        def before(teacher: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            args, kwargs = copy_caches(args, kwargs)
            try:
                with evaluating(students[site.name]):
                    answers[site.name].append(students[site.name](*args, **kwargs))
            except Exception as error:
                raise StudentError(
                    f"the student at site {site.name!r} was called as its teacher is called.",
                    f"It raised {type(error).__name__}: {error}",
                    "give it the teacher's signature. Nothing was changed.",
                ) from error

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
    try:
        with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=[]), plain_attention():
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    for name, given in answers.items():
        if not given:
            raise unreached(name)


def is_compiled(model: nn.Module, name: str) -> bool:
    """Tell whether a module runs in compiled code, which does not report that it was called."""
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:cut])) for cut in range(len(parts) + 1)]
    return any(module._compiled_call_impl is not None or hasattr(module, "_orig_mod") for module in around)


def unreached(name: str) -> HandoverError:
    """Say that a forward passed a site by."""
    return HandoverError(
        f"a forward of the model was to pass site {name!r}.",
        "Its module was never called: it is unused, or another path of the code computes its work.",
        "choose sites that every forward calls, or plan with unreached='ignore' for experts and skipped layers.",
    )


def call_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read an example batch: keyword arguments as a dict, several arguments as a tuple, else the one argument."""
    if isinstance(example, dict) or (hasattr(example, "keys") and not isinstance(example, Tensor)):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode and give each its own mode back."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode


@contextmanager
def plain_attention() -> Iterator[None]:
    """Keep torch's fused encoder path out, which computes attention without calling the attention module."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextmanager
def in_place_of_seams(model: nn.Module, modules: dict[Site, nn.Module]) -> Iterator[None]:
    """Put plain modules where the seams are, for a moment."""
    seams = {site: model.get_submodule(site.name) for site in modules}
    try:
        for site, module in modules.items():
            for name in site.names:
                put(model, name, module)
        yield
    finally:
        for site, seam in seams.items():
            for name in site.names:
                put(model, name, seam)


class Snapshot:
    """What the surgery changes besides the modules: which parameters train, and every module's mode."""

    def __init__(self, model: nn.Module) -> None:
        self.gradients = [(p, p.requires_grad) for p in model.parameters()]
        self.modes = [(m, m.training) for m in model.modules()]
        self.mode = model.training
        self.tensors: dict[str, Tensor] = {}

    def keep_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Remember values that training will change, in main memory."""
        self.tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def forget(self, module: nn.Module) -> None:
        """Let go of a module that will not come back, so that its memory can be freed."""
        gone = {id(x) for x in (*module.parameters(), *module.modules())}
        self.gradients = [(p, flag) for p, flag in self.gradients if id(p) not in gone]
        self.modes = [(m, mode) for m, mode in self.modes if id(m) not in gone]

    def restore(self, model: nn.Module) -> None:
        for parameter, flag in self.gradients:
            parameter.requires_grad_(flag)
        if model.training == self.mode:
            for module, mode in self.modes:
                module.training = mode
        else:
            model.train(model.training)

    def restore_tensors(self, model: nn.Module) -> None:
        state = model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, value in self.tensors.items():
                state[name].copy_(sharded_like(value, state[name]))


def free(modules: list[nn.Module], model: nn.Module) -> None:
    """Free the parameters of modules that have left the model, where a distributed wrapper holds on to them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    in_use = {id(parameter) for parameter in model.parameters()}
    for module in modules:
        for parameter in module.parameters():
            if id(parameter) in in_use:
                continue
            if hasattr(parameter, "to_local"):
                parameter.to_local().untyped_storage().resize_(0)  # FSDP has other tensors on it
            else:
                parameter.data = parameter.data.new_empty(0)  # what else lies on its storage, a user's state_dict, lives on


class PinnedModes:
    """Stand in for `model.train` so that a frozen backbone stays in evaluation while its students train.

    Modules that contain a site follow the mode, because frameworks ask them for it (gradient checkpointing does).
    """

    def __init__(self, model: nn.Module, pinned: list[nn.Module]) -> None:
        self.model = model
        self.pinned = pinned

    def __call__(self, mode: bool = True) -> nn.Module:
        type(self.model).train(self.model, mode)
        for module in self.pinned:
            module.training = False
        return self.model


def sharded_like(value: Tensor, target: Tensor) -> Tensor:
    """Shard a whole tensor over ranks as its target is sharded."""
    if not hasattr(target, "full_tensor"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(target, DTensor)
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements)
