"""fit_locally(): each student fits its teacher's recorded features, without the model, site by site and side by side."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from segue.border import NotNegative, PositiveInt, checked
from segue.checkpoint import folders, packing
from segue.checkpoint.lock import locked
from segue.core import randomness
from segue.core.auxiliary import shares_of, weighted_mean
from segue.core.blending import first_floating, padding_mask
from segue.core.calibrate import Fitted
from segue.core.handover import Handover
from segue.core.local_fit import MEMORY
from segue.core.tensor_files import fingerprint
from segue.errors import ConfigError, HandoverError, MissingExtraError, TrainingError
from segue.losses import PairLoss, stated_axis
from segue.phases import Kind
from segue.plan import encode
from segue.similarity import move_features, relative_error
from segue.sites import Site
from segue.training.feature_files import FeatureFiles, Recorded, recorded
from segue.training.progress import Progress
from segue.training.recipe import Recipe

Engine = Literal["processes", "ray"]


@checked
def fit_locally(
    handover: Handover,
    batches: Iterable[Any],
    *,
    recipe: Recipe,
    split: PositiveInt = 1,
    tolerance: NotNegative = 0.0,
    cache: str | os.PathLike[str] | None = None,
    workers: PositiveInt = 1,
    engine: Engine = "processes",
    mask: Callable[[Any], Tensor | None] = padding_mask,
    progress: str | None = "local fit",
) -> dict[str, Fitted]:
    """Fit the students of a handover to their teachers on fixed batches, with one forward of the model for each.

    >>> import torch
    >>> import segue
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    >>> handover = segue.replace_(model, segue.methods.dcr_dfg("0"), total_steps=10)
    >>> inputs = [torch.randn(8, 4) for _ in range(2)]
    >>> fitted = segue.fit_locally(handover, inputs, recipe=segue.Recipe(epochs=2, lr=1e-2), progress=None)
    >>> list(fitted)
    ['0']

    Returns the relative error of each student in the first step, and its running mean at the end.

    Args:
        handover: A running handover at alpha 1.
        batches: What the model is called with, again for each epoch.
        recipe: For how many steps, of one batch each, or epochs, and at which rate.
        split: Sub-batches of every batch, each of which is an update.
        tolerance: A site whose running relative error is below it stops.
        cache: A folder for features and finished students: the same call resumes there.
        workers: Processes, or Ray workers, that share the sites; the result is the same to the bit.
        engine: What the workers are.
        mask: batch -> its padding mask, 1 where a token counts; by default its `attention_mask`.
        progress: The name of the progress bar; None shows none.
    """
    _refuse_unfit(handover, recipe)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()) if cache is None else cache).resolve()
        stack.enter_context(locked(folder))
        stack.enter_context(randomness.kept())
        features = recorded(handover, batches, folder, split, mask)
        jobs = list(_jobs(handover, features, recipe, split, tolerance))
        waiting = [job for job in jobs if job.finished is None]
        shown = stack.enter_context(closing(Progress(progress, len(jobs), done=len(jobs) - len(waiting))))
        runs = {"processes": _in_processes, "ray": _on_ray}[engine] if waiting else _in_processes
        for done, name in enumerate(runs(waiting, workers), start=len(jobs) - len(waiting) + 1):
            shown(done, f"site {name}")
        return {job.site.name: _take(job, handover) for job in jobs}


def _refuse_unfit(handover: Handover, recipe: Recipe) -> None:
    handover.require_teachers("fit_locally()")
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise HandoverError(
            "fit_locally() is for one process.", "It spreads the sites itself.", "launch one process, and give workers=n."
        )
    single = (("accumulate", 1), ("precision", "float32"), ("compile", False), ("shard", False))
    for name, usual in (*single, ("guard", None), ("ema", None), ("early_stopping", None)):
        if getattr(recipe, name) != usual:
            raise ConfigError(
                f"fit_locally() does not take Recipe({name}={getattr(recipe, name)!r}).",
                "Every update is one of a single student, in the precision of its weights, and nothing is evaluated.",
                f"leave {name} out. Nothing was changed.",
            )


@dataclass(frozen=True)
class Job:
    """All that the fit of one site needs: it depends on nothing else."""

    site: Site
    place: int
    student: nn.Module
    guidance: PairLoss
    weight: float
    features: FeatureFiles
    recipe: Recipe
    kinds: dict[str, Kind]
    split: int
    tolerance: float
    total: int
    threads: int  # of torch: another number may round otherwise
    key: str  # the hash of everything that the result depends on

    @property
    def folder(self) -> Path:
        return self.features.folder / "students" / str(self.place)

    @property
    def finished(self) -> folders.Checkpoint | None:
        """What an earlier call has written, if it was the same fit."""
        if not folders.exist(self.folder):
            return None
        saved = folders.read(self.folder)
        return saved if saved.state.get("key") == self.key else None


def _jobs(handover: Handover, features: FeatureFiles, recipe: Recipe, split: int, tolerance: float) -> Iterator[Job]:
    kind_of = dict(zip(map(id, handover.parameters()), handover.parameter_kinds().values(), strict=True))
    total, guidance = recipe.total_steps(features.batches), handover.plan.guidance
    assert guidance is not None
    for place, (name, seam) in enumerate(handover.seams.items()):
        weight = handover.auxiliary.guidance.get(name, 0.0)
        kinds = {key: kind_of[id(p)] for key, p in seam.student.named_parameters() if id(p) in kind_of}
        begins = fingerprint(seam.student.state_dict())
        known = [features.key, place, begins, encode(guidance), weight, repr(recipe), kinds, split, tolerance, total]
        yield Job(
            site=seam.site,
            place=place,
            student=copy.deepcopy(seam.student),
            guidance=guidance,
            weight=weight,
            features=features,
            recipe=recipe,
            kinds=kinds,
            split=split,
            tolerance=tolerance,
            total=total,
            threads=torch.get_num_threads(),
            key=hashlib.sha256(json.dumps(known).encode()).hexdigest(),
        )


def fit_site(job: Job) -> str:
    """Fit one student to its features, write it, and return the name of its site."""
    torch.set_num_threads(job.threads)
    with randomness.kept():
        randomness.seed_all(job.recipe.seed, job.place)
        before, after, updates = _learn(job)
    state = {"kind": "local fit", "key": job.key, "before": before, "after": after, "segue": {"step": updates}}
    packing.write(job.folder, state, packing.tensor_state(job.student), keep=1)
    return job.site.name


def _learn(job: Job) -> tuple[float, float, int]:
    """Train the student of a job; return its error in the first step, the running one at the end, and the updates."""
    student, recipe = job.student.train(), job.recipe
    trained = [(name, p) for name, p in student.named_parameters() if name in job.kinds]
    optimizer = recipe.optimizer(trained, job.kinds)
    parameters = [p for _, p in trained]
    before, running, updates = math.nan, math.nan, 0
    for step in range(job.total):
        epoch, place = divmod(step, job.features.batches)
        if place == 0:
            order = _order(job, epoch)
        batch = job.features.read(job.place, order[place], verify=epoch == 0)
        recipe.set_rate(optimizer, step, job.total)
        errors = []
        for loss, error in _losses(job, batch, _device(student)):
            loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            if math.isfinite(norm.item()):
                if recipe.clip is not None:
                    nn.utils.clip_grads_with_norm_(parameters, recipe.clip, norm)
                optimizer.step()
                updates += 1
                errors.append(error)
            elif recipe.on_nan == "stop":
                raise TrainingError(
                    f"the student at site {job.site.name!r} has no finite update in step {step}.",
                    f"Its loss is {loss.item():.6g}, the norm of its gradient {norm.item():.6g}.",
                    "lower lr or clip, or skip such updates with Recipe(on_nan='skip').",
                )
            optimizer.zero_grad()
        if errors:
            now = torch.stack(errors).mean().sqrt().item()
            before = now if math.isnan(before) else before
            running = now if math.isnan(running) else MEMORY * running + (1 - MEMORY) * now
        if running < job.tolerance:
            break
    return before, running, updates


def _losses(job: Job, batch: Recorded, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the guidance and the squared relative error of every sub-batch, from the student as it is then."""
    rows = min((call.rows for call in batch.calls), default=0)
    for index in range(min(job.split, rows)):
        mask = None if batch.mask is None else batch.mask[index :: job.split].to(device)
        pairs, read = [], []
        for call, axis in zip(batch.calls, batch.axes, strict=True):
            parts = call.part(index, job.split, (call.args, call.kwargs, call.output))
            args, kwargs, target = tree_map_only(Tensor, lambda x: x.to(device), parts)
            pair = target, first_floating(job.student(*args, **kwargs), job.site)
            pairs.append(pair)
            read.append(pair if axis is None else tuple(move_features(x, axis) for x in pair))
        given = pairs if stated_axis(job.guidance) is not None else read
        with torch.no_grad():
            error = torch.stack([relative_error(t, s, mask).mean() for t, s in read]).mean()
        yield weighted_mean(job.weight, shares_of(job.guidance, given, mask)), error


def _order(job: Job, epoch: int) -> list[int]:
    """Return the order of the batches in an epoch, the same at every site."""
    generator = torch.Generator().manual_seed(hash((job.recipe.seed, epoch)) & 0x7FFFFFFF)
    order: list[int] = torch.randperm(job.features.batches, generator=generator).tolist()
    return order


def _device(student: nn.Module) -> torch.device:
    return next((p.device for p in student.parameters()), torch.device("cpu"))


def _take(job: Job, handover: Handover) -> Fitted:
    """Give a student of the handover what its fit has written."""
    saved = job.finished
    assert saved is not None
    targets = packing.tensor_state(handover.seams[job.site.name].student)
    stored = {name: value for name, value in saved.tensors.items() if name in targets}
    packing.require_same_shapes(targets, stored)
    packing.copy_(targets, stored, [])
    return Fitted(saved.state["before"], saved.state["after"])


def _in_processes(jobs: list[Job], workers: int) -> Iterator[str]:
    """Fit here, one after the other, or in this many processes."""
    if workers == 1 or len(jobs) < 2:
        yield from map(fit_site, jobs)
        return
    _require_sendable(jobs)
    with ProcessPoolExecutor(min(workers, len(jobs)), multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(fit_site, job) for job in jobs]
        try:
            for done in as_completed(pending):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _on_ray(jobs: list[Job], workers: int) -> Iterator[str]:
    """Fit on a Ray cluster whose machines share the folder."""
    try:
        import ray
    except ImportError:
        raise MissingExtraError("the engine ray is not available.", "Ray is not installed.", "pip install segue[ray]") from None
    _require_sendable(jobs)
    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False, include_dashboard=False)  # the cluster of RAY_ADDRESS, or one on this machine
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    cores = max(1.0, resources.get("CPU", 1.0) / workers)
    work = ray.remote(num_cpus=cores, num_gpus=min(1.0, resources.get("GPU", 0.0)), max_retries=2)(fit_site)
    try:
        pending = [work.remote(job) for job in jobs]
        while pending:
            (done,), pending = ray.wait(pending, num_returns=1)
            yield ray.get(done)
    finally:
        if ours:
            ray.shutdown()


def _require_sendable(jobs: list[Job]) -> None:
    for job in jobs:
        try:
            pickle.dumps((job.student, job.guidance))
        except Exception as error:
            raise ConfigError(
                f"the student at site {job.site.name!r} cannot be sent to another process.",
                f"It, or the guidance, cannot be pickled: {error}.",
                "define its class and functions at the top of a module, or use workers=1. Nothing was changed.",
            ) from None
