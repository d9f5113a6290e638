"""Costs of the options: operations, parameters and bytes counted, prefill, training and decoding timed on this device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from segue.core.backbone import evaluating
from segue.core.blending import call_arguments, calling, tensors
from segue.core.local_fit import Call
from segue.diagnostics.counting import cache_bytes, flops
from segue.planning.candidates import Candidates, Option
from segue.students.attention.cache_copy import is_cache
from segue.students.layers import layers_of

Metric = Literal["flops", "parameters", "cache_bytes", "prefill", "decode", "train"]
METRICS: tuple[Metric, ...] = get_args(Metric)
ROUNDS = 5  # timed calls of each module, after one that is not counted
UNITS = {"flops": "FLOPs", "parameters": "parameters", "cache_bytes": "bytes", "prefill": "s", "decode": "s", "train": "s"}


@dataclass(frozen=True)
class CostTable:
    """What the model, each teacher and each student cost, by metric; a metric that the model does not have is missing."""

    total: dict[str, float]
    teachers: dict[str, dict[str, float]]  # by site
    students: dict[Option, dict[str, float]]
    shape: str  # of the inputs, as text
    operations: float = 0.0  # that measuring all this took

    def saved(self, option: Option, metric: str) -> float:
        """Return what an option saves, as a fraction of the complete model; below 0 where the student costs more."""
        return (self.teachers[option[0]][metric] - self.students[option][metric]) / self.total[metric]

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain data."""
        students = [{"site": site, "candidate": name, **cost} for (site, name), cost in self.students.items()]
        parts = {"total": self.total, "teachers": self.teachers, "students": students, "shape": self.shape}
        return {**parts, "operations": self.operations}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostTable:
        """Rebuild a table from `to_dict`."""
        students = {
            (row["site"], row["candidate"]): {key: value for key, value in row.items() if key not in ("site", "candidate")}
            for row in data["students"]
        }
        return cls(data["total"], data["teachers"], students, data["shape"], data.get("operations", 0.0))


def measure_costs(candidates: Candidates, batch: Any) -> CostTable:
    """Count and time every teacher and student on the call that a batch makes at its site."""
    handover, model = candidates.handover, candidates.model
    args, kwargs = call_arguments(batch)
    with evaluating(model), handover.features() as features, calling("cost_batch"):
        model(*args, **kwargs)
    teachers = {site: handover.seams[site].require_teacher() for site in candidates.sites}
    costs: dict[Any, dict[str, float]] = {}
    operations = 0.0
    modules: dict[Any, tuple[str, nn.Module]] = {site: (site, module) for site, module in teachers.items()}
    modules |= {option: (option[0], student) for option, student in candidates.students.items()}
    for key, (site, module) in modules.items():
        costs[key], taken = _module_costs(module, features.calls[site])
        operations += taken
    with candidates.showing(()):
        total: dict[str, float] = {
            "flops": float(flops(lambda: model(*args, **kwargs))),
            "parameters": float(_parameters(model) - sum(_parameters(s.student) for s in handover.seams.values())),
            "prefill": _seconds(lambda: model(*args, **kwargs)),
        }
        operations += (ROUNDS + 3) * total["flops"]  # one for the features, one that is counted
        with torch.enable_grad(), _trainable(model):

            def learn() -> None:
                _learn(model(*args, **kwargs), list(model.parameters()))

            operations += (ROUNDS + 2) * flops(learn)
            total["train"] = _seconds(learn)
    if decoding := _decoding(candidates, batch):
        operations += (1 + len(candidates.names)) * total["flops"]  # single tokens are few
        for key, found in decoding.items():
            (total if key is None else costs[key]).update(found)
    shapes = " and ".join(" x ".join(map(str, x.shape)) for x in tensors((args, kwargs)))
    return CostTable(
        total, {site: costs[site] for site in teachers}, {o: costs[o] for o in candidates.options}, shapes, operations
    )


def _module_costs(module: nn.Module, calls: list[Call]) -> tuple[dict[str, float], float]:
    """Count and time one module on its calls in a forward of the model; and count what that takes."""

    def run() -> list[Any]:
        return [_called(module, call.args, call.kwargs) for call in calls]

    def learn() -> None:
        for call in calls:
            args, kwargs = tree_map_only(Tensor, _differentiable, (call.args, call.kwargs))
            given = [x for x in tensors((args, kwargs)) if x.requires_grad]
            _learn(_called(module, args, kwargs), [*given, *module.parameters()])

    with evaluating(module), torch.no_grad():
        found = {"flops": float(flops(run)), "parameters": float(_parameters(module)), "prefill": _seconds(run)}
    with evaluating(module), torch.enable_grad(), _trainable(module):
        operations = (ROUNDS + 2) * (found["flops"] + flops(learn))
        return {**found, "train": _seconds(learn)}, operations


def _called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module; the layers of a span one after the other, each with the output of the one before."""
    first, *others = layers_of(module)
    output = first(*args, **kwargs)
    for layer in others:
        stream = next(x for x in tensors(output) if x.is_floating_point())
        output = layer(stream, *args[1:], **{k: v for k, v in kwargs.items() if args or k != "hidden_states"})
    return output


def _learn(output: Any, wanted: list[Tensor]) -> None:
    found = next((x for x in tensors(output) if x.requires_grad), None)
    if found is not None:  # zeros depend on nothing
        torch.autograd.grad(found.float().square().mean(), [x for x in wanted if x.requires_grad], allow_unused=True)


def _differentiable(x: Tensor) -> Tensor:
    """Return an input with a gradient; no leaf of the graph, because the counter of operations takes none as an input."""
    return x.detach().requires_grad_().view_as(x) if x.is_floating_point() else x


@contextmanager
def _trainable(module: nn.Module) -> Iterator[None]:
    """Let the weights of a frozen teacher have gradients while a block runs."""
    before = [(p, p.requires_grad) for p in module.parameters()]
    for parameter, _ in before:
        parameter.requires_grad_(parameter.is_floating_point())
    try:
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)


@contextmanager
def _timed(parts: Mapping[str, Any], spent: dict[str, float]) -> Iterator[None]:
    """Add the seconds of every call of some modules while a block runs."""

    def enters(name: str) -> Callable[..., None]:
        return lambda *_: spent.update({name: spent[name] - time.perf_counter()})

    def leaves(name: str) -> Callable[..., None]:
        return lambda *_: spent.update({name: spent[name] + time.perf_counter()})

    modules = [(name, module) for name, several in parts.items() for module in several]
    handles = [module.register_forward_pre_hook(enters(name)) for name, module in modules]
    handles += [module.register_forward_hook(leaves(name)) for name, module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _decoding(candidates: Candidates, batch: Any) -> dict[Any, dict[str, float]]:
    """Time single tokens after the batch, and count the bytes that each site keeps; nothing for a model without a cache."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    model: Any = candidates.model
    if ids is None or not hasattr(model, "generate") or any(seam.site.is_span for seam in candidates.handover.seams.values()):
        return {}
    with candidates.showing(()):
        if getattr(model(input_ids=ids[:, :1], use_cache=True), "past_key_values", None) is None:
            return {}
    found: dict[Any, dict[str, float]] = {}
    for name in (None, *candidates.names):
        shown = () if name is None else [(site, name) for site in candidates.at(name)]
        kept = dict.fromkeys(candidates.sites, 0.0)
        spent = dict.fromkeys(candidates.sites, 0.0)
        seams: dict[str, list[nn.Module]] = {site: [seam] for site, seam in candidates.handover.seams.items()}
        with candidates.showing(shown):
            with _counted_cache(seams, kept):
                output = model(input_ids=ids, use_cache=True)
            token, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
            complete = cache_bytes(cache)
            steps = []
            for turn in range(ROUNDS + 1):
                if turn == 1:
                    spent.update(dict.fromkeys(spent, 0.0))  # the first is not counted
                with _timed(seams, spent):
                    begun = time.perf_counter()
                    model(input_ids=token, past_key_values=cache, use_cache=True)
                    steps.append(time.perf_counter() - begun)
        if name is None:
            found[None] = {"cache_bytes": float(complete), "decode": statistics.median(steps[1:])}
        for site in candidates.sites if name is None else candidates.at(name):
            found[site if name is None else (site, name)] = {"cache_bytes": kept[site], "decode": spent[site] / ROUNDS}
    return found


@contextmanager
def _counted_cache(seams: Mapping[str, list[nn.Module]], kept: dict[str, float]) -> Iterator[None]:
    """Add the bytes that a cache grows by at each site."""

    def size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        return sum(cache_bytes(x) for x in (*args, *kwargs.values()) if is_cache(x))

    def enters(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs: kept.update({name: kept[name] - size(args, kwargs)})

    def leaves(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs, _output: kept.update({name: kept[name] + size(args, kwargs)})

    handles = [seam.register_forward_pre_hook(enters(name), with_kwargs=True) for name, (seam,) in seams.items()]
    handles += [seam.register_forward_hook(leaves(name), with_kwargs=True) for name, (seam,) in seams.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS + 1):
        begun = time.perf_counter()
        run()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in {id(p): p for p in module.parameters()}.values())
