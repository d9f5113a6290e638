"""What the two processes of the distributed tests of fit() run; without a rank it is the one process they are compared with."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import segue
from segue.checkpoint.state import saved_step
from segue.core.tensor_files import full
from segue.errors import SegueError
from segue.lab.run import run
from segue.phases import Phase, Rates
from segue.training.tasks import Classification
from tests.helpers import tiny_runs
from tests.helpers.tiny import SITES, Net, batch
from tests.torture.wrong_calls import fingerprint
from tests.training.fit_cases import CountedBatches, half_copied

WORLD = 2
ENGINES = ("ddp", "fsdp2")
STEPS = 6
DEPTH = 2
COIN_SEED = 1
SOON = segue.schedules.Linear(start=0.9, until=0.6)  # takeover at step 4
VALIDATION = [batch(50, size=5), batch(51, size=4), batch(52, size=1)]  # the last cannot be cut in two
UNEVEN = CountedBatches(count=6, size=5)  # three examples for one process, two for the other
METHODS = segue.methods
CALM = {"lr": 1e-2, "eps": 1e-3}  # Adam would blow the rounding of a zero gradient up to its size

PLANS: dict[str, segue.Plan | None] = {
    "dcr_dfg": METHODS.dcr_dfg(sites=SITES, schedule=SOON),
    "theseus": METHODS.theseus(sites=SITES, schedule=SOON, seed=COIN_SEED),
    "distillation": METHODS.distillation(sites=SITES),
    "lolcats": METHODS.lolcats(sites=SITES, hold=0.4),
    "everything trains": METHODS.gumbel_dfg(sites=SITES, schedule=SOON, train="all"),
    "local fit": segue.Plan(
        sites=SITES,
        guidance=segue.losses.FeatureGuidance(),
        phases=(Phase(name="local", length=0.5, local=True, split=2, reuse=2, tolerance=0.1), Phase(name="students alone")),
    ),
    "transfer": METHODS.transfer(
        sites=SITES, student=half_copied, hold=0.4, first="new", split=1, lr=Rates(new=1e-2, copied=1e-3)
    ),
    "no plan": None,
}


def coins() -> list[float]:
    """Return how many coins of the Theseus run fall on the student, in each step before its takeover."""
    sites = [segue.Site(f"blocks.{index}.attn") for index in range(DEPTH)]
    noises = [[segue.gates.Noise(COIN_SEED, step, site.name) for site in sites] for step in range(4)]
    gate = segue.gates.Bernoulli()
    return [sum(gate(SOON(step / STEPS, site), n) for site, n in zip(sites, noises[step], strict=True)) for step in range(4)]


class Watched(Classification):
    """A loss that remembers what it was called with."""

    def __init__(self) -> None:
        super().__init__(label_smoothing=0.1)
        self.networks: list[str] = []
        self.rows: list[int] = []
        self.sharded: list[list[bool]] = []

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.networks.append(type(model).__name__)
        self.rows.append(len(batch[0]))
        self.sharded.append(sorted({isinstance(parameter, DTensor) for parameter in model.parameters()}))
        return super().__call__(model, batch)


def fit(
    engine: str, plan: segue.Plan | None, *, loss: Any = None, batches: Any = None, dropout: float = 0.0, **more: Any
) -> Any:
    own = ("accumulate", "on_nan", "steps", "guard", "ema", "early_stopping")
    recipe = {name: more.pop(name) for name in own if name in more}
    recipe_type = more.pop("recipe_type", segue.Recipe)
    settings = {"evaluations": (1, 4), "validation": VALIDATION, "progress": None, "checkpoint_every": 3, **more}
    return segue.fit(
        Net(depth=DEPTH, dropout=dropout),
        plan,
        UNEVEN if batches is None else batches,
        loss or Classification(label_smoothing=0.1),
        recipe=recipe_type(**{"steps": STEPS, "shard": engine == "fsdp2", **CALM, **recipe}),
        **settings,
    )


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(tensor).detach().clone() for name, tensor in model.state_dict().items()}


def without_times(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in metrics.items() if name != "seconds"} for metrics in history]


def train(engine: str, folder: Path) -> dict[str, Any]:
    """Train every plan through its takeover."""
    found = {}
    for name, plan in PLANS.items():
        if engine == "fsdp2" and name in ("distillation", "lolcats", "local fit"):
            continue  # slow there, and in test_distributed.py already; the last is refused
        for accumulate in (1, 2) if name == "dcr_dfg" or (name == "no plan" and engine != "fsdp2") else (1,):
            loss = Watched()
            fitted = fit(engine, plan, loss=loss, accumulate=accumulate)
            found[f"{name}, {accumulate} batches a step"] = {
                "points": without_times(fitted.history),
                "weights": weights(fitted.model),
                "networks": sorted(set(loss.networks)),
                "rows": loss.rows[:3],
                "sharded": loss.sharded[2 * accumulate],  # in a step that follows no evaluation
            }
    return found


def resume(engine: str, folder: Path) -> dict[str, Any]:
    """Stop a run by an error after its checkpoint, and resume it here."""
    found = {}
    for name in ("everything trains", "no plan"):
        place = folder / f"{engine}, {name}"
        undisturbed = fit(engine, PLANS[name], dropout=0.2, folder=place / "undisturbed", steps=STEPS)
        try:
            fit(
                engine,
                PLANS[name],
                dropout=0.2,
                folder=place / "run",
                steps=STEPS,
                checkpoint_every=2,
                loss=Stopping("error", 4),
            )
        except RuntimeError as error:
            assert str(error) == "the power failed"  # noqa: PT017
        torch.manual_seed(99)
        again = fit(engine, PLANS[name], dropout=0.2, folder=place / "run", resume=True, steps=STEPS)
        found[name] = {
            "points": without_times(undisturbed.history),
            "resumed points": without_times(again.history),
            "weights": weights(undisturbed.model),
            "resumed": weights(again.model),
        }
    return found


class Stopping(Classification):
    """A loss that raises, or sends a signal to one process of the two, at a certain step."""

    def __init__(self, how: str, step: int, rank: int = 1) -> None:
        super().__init__(label_smoothing=0.1)
        self.how, self.left, self.rank = how, step + 1, rank

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.left -= 1
        if self.left == 0 and self.how == "error":
            raise RuntimeError("the power failed")
        if self.left == 0 and dist.get_rank() == self.rank:
            os.kill(os.getpid(), getattr(signal, self.how))
        return super().__call__(model, batch)


def leave_at(engine: str, folder: Path) -> dict[str, Any]:
    """Save in the middle, without dropout, for others to resume."""
    found = {}
    for name in ("dcr_dfg", "no plan"):
        place = folder / f"left by {engine}, {name}"
        try:
            fit(engine, PLANS[name], folder=place, steps=STEPS, loss=Stopping("error", 4))
        except RuntimeError:
            found[name] = str(place)
    return found


def resume_other(engine: str, folder: Path) -> dict[str, Any]:
    """Resume what one process has left."""
    found = {}
    for name in ("dcr_dfg", "no plan"):
        place = folder / f"left by one for {engine}, {name}"
        found[name] = without_times(fit(engine, PLANS[name], folder=place, steps=STEPS, resume=True).history)
    return found


def stop(engine: str, folder: Path) -> dict[str, Any]:
    """One process gets a signal; all must stop after the same step, with a checkpoint."""
    found = {}
    for how, step in (("SIGTERM", 3), ("SIGINT", 2), ("SIGTERM", STEPS - 1)):
        place = folder / f"{engine} {how} {step}"
        try:
            fit(engine, PLANS["dcr_dfg"], folder=place, steps=STEPS, loss=Stopping(how, step))
        except SystemExit as error:
            left = f"SystemExit {error.code}"
        except KeyboardInterrupt:
            left = "KeyboardInterrupt"
        else:
            left = "went on"
        found[f"{how} {step}"] = left, saved_step(place / "checkpoints")
    return found


def broken(engine: str, folder: Path) -> dict[str, Any]:
    """A NaN in the part of one process stops both, or is left out by both."""
    found: dict[str, Any] = {}
    batches = CountedBatches(count=6, size=5).batches
    batches[3][0][4] = math.nan  # of the second process
    for name, settings in {"stop": {}, "accumulated": {"accumulate": 2}, "loss": {"loss": NanOnOne()}}.items():
        try:
            fit(engine, PLANS["dcr_dfg"], batches=UNEVEN if name == "loss" else batches, **settings)
        except SegueError as error:
            found[name] = str(error)
    skipped = fit(engine, PLANS["dcr_dfg"], batches=batches, on_nan="skip")
    found["skip"] = skipped.skipped, weights(skipped.model)
    normed = segue.Plan(sites=SITES, student=lambda teacher, site: Normed(), schedule=SOON)
    skipped = fit(engine, normed, batches=batches, on_nan="skip", evaluations=1, validation=None)
    found["skip, with statistics"] = skipped.skipped, weights(skipped.model)
    try:
        fit(engine, PLANS["dcr_dfg"], recipe_type=BrokenMoments)
    except SegueError as error:
        found["weights"] = str(error)
    return found


def guarded(engine: str, folder: Path) -> dict[str, Any]:
    """A NaN in the part of one process, and a huge batch, are undone by both; stopped and resumed; averaged; ended early."""
    batches = CountedBatches(count=14, size=5).batches
    batches[7][0][4] = math.nan  # of the second process
    batches[10] = (batches[10][0] * 1e4, batches[10][1])
    settings: dict[str, Any] = {
        "steps": 14,
        "batches": batches,
        "guard": segue.Guard(warmup=4, window=6, every=3, recovery=4),
        "ema": segue.Ema(decay=0.9, final=True),
        "early_stopping": segue.EarlyStopping(score="loss", mode="min", patience=2, restore_best=True),
        "evaluations": (3, 8, 9, 10, 12, 14),
        "dropout": 0.2,
        "checkpoint_every": 8,
    }
    schedule = segue.schedules.Linear(start=0.4, until=0.5)
    plan = METHODS.dcr_dfg(sites=SITES, schedule=schedule, train="all")
    place = folder / f"{engine}, guarded"
    undisturbed = fit(engine, plan, folder=place / "undisturbed", **settings)
    try:
        fit(engine, plan, folder=place / "run", loss=Stopping("error", 9), **settings)
    except RuntimeError as error:
        assert str(error) == "the power failed"  # noqa: PT017
    again = fit(engine, plan, folder=place / "run", resume=True, **settings)
    return {
        "events": undisturbed.events,
        "points": without_times(undisturbed.history),
        "resumed points": without_times(again.history),
        "ends": [(one.stopped_at, one.best_step) for one in (undisturbed, again)],
        "weights": weights(undisturbed.model),
        "resumed": weights(again.model),
    }


class Normed(nn.Module):
    """A student with batch-norm statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class BrokenMoments(segue.Recipe):
    """A recipe whose optimizer has a moment of NaN in the last step, in what the second process holds of it."""

    def optimizer(self, named: Any) -> Any:
        named = list(named)
        made = super().optimizer(named)
        target = dict(named)["blocks.1.attn.proj.weight"]
        steps: list[int] = []

        def before(*_: Any) -> None:
            steps.append(1)
            moment = made.state[target].get("exp_avg") if len(steps) == STEPS else None
            if isinstance(moment, DTensor) and dist.get_rank() == 0:
                return
            if moment is not None:
                (moment.to_local() if isinstance(moment, DTensor) else moment).fill_(math.nan)

        made.register_step_pre_hook(before)
        return made


def failed(engine: str, folder: Path) -> dict[str, Any]:
    """A training that fails in both processes leaves the model as it was; what is sharded stays so, and that is said."""
    found: dict[str, Any] = {}
    for name, plan in {"no plan": None, "released": METHODS.dcr(sites=SITES, schedule=SOON, release=True)}.items():
        model = Net(depth=DEPTH, dropout=0.2).eval()
        before = fingerprint(model)
        recipe = segue.Recipe(steps=STEPS, shard=engine == "fsdp2", **CALM)
        try:
            segue.fit(model, plan, UNEVEN, Stopping("error", 5), recipe=recipe, progress=None)
        except RuntimeError as error:
            restored = engine == "fsdp2" or fingerprint(model) == before
            found[name] = restored, getattr(error, "__notes__", [])
    return found


class NanOnOne(Classification):
    """A loss that is NaN in one process, although all outputs are finite."""

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().__call__(model, batch) * (math.nan if dist.get_rank() == 1 else 1.0)


def own_batches(engine: str, folder: Path) -> dict[str, Any]:
    """Each process reads batches of its own, as with a DistributedSampler."""
    halves = [tuple(part[2 * dist.get_rank() :][:2] for part in batch(i, size=4)) for i in range(6)]
    fitted = fit(engine, PLANS["dcr_dfg"], batches=halves, split_batches=False)
    return {"points": without_times(fitted.history)}


def lab(engine: str, folder: Path) -> dict[str, Any]:
    """Carry out a complete run: a teacher in two stages, the replacement, the result, the model."""
    shard = engine == "fsdp2"
    stages = tuple(replace(stage, recipe=replace(stage.recipe, shard=shard, **CALM)) for stage in tiny_runs.TEACHER.stages)
    teacher = replace(tiny_runs.TEACHER, stages=stages, batch=15)
    recipe = segue.Recipe(steps=5, shard=shard, **CALM)
    config = tiny_runs.config("dcr_dfg", teacher=teacher, recipe=recipe, batch=15, evaluations=2)
    result = run(config, folder / engine / "tiny" / "lab", keep_model=True)
    return json.loads(json.dumps(asdict(result.train_info)))


def track(engine: str, folder: Path) -> dict[str, Any]:
    """Trackers are closed without parting the processes."""
    fit(engine, None, folder=folder / f"tracked {engine}", steps=2, trackers=["tensorboard"])
    value = torch.ones(1)
    dist.all_reduce(value)
    return {"sum": value.item()}


JOBS: tuple[Callable[[str, Path], dict[str, Any]], ...] = (
    train,
    resume,
    leave_at,
    resume_other,
    stop,
    own_batches,
    track,
    lab,
    broken,
    guarded,
    failed,
)


def jobs(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return every job under every engine, by name."""
    return {f"{job.__name__} {engine}": partial(job, engine, folder) for engine in ENGINES for job in JOBS}
