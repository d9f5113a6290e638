"""convert(): pretrained model and data in, a folder with the converted model out; goes on where it was interrupted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from segue.convert import folder, pretrained
from segue.convert import parse as words
from segue.convert.base import Base, open_base
from segue.convert.data import Data, Reading, load
from segue.errors import ConfigError, SiteError, nearest
from segue.losses import FeatureGuidance
from segue.methods import ALL
from segue.plan import Plan
from segue.reporting.records import write_json
from segue.schedules import Constant
from segue.sites import Selector, Span, select
from segue.training import distributed as launch
from segue.training.distributed import Processes
from segue.training.evaluation import Evaluator
from segue.training.fit import fit
from segue.training.recipe import Recipe

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Everything that one conversion depends on."""

    model: str
    sites: str
    student: str
    data: str
    steps: int
    method: str = "dcr_dfg"
    keep: str | None = None  # sites among them that stay as they are
    batch: int = 8
    tokens: int = 256
    lr: float = 5e-4
    warmup: float = 0.05
    accumulate: int = 1
    train: str = "students"
    precision: str = "float32"
    dtype: str | None = None  # of the weights that are saved; the original's if not given
    shard: bool = False
    compile: bool = False
    validation: float = 0.05
    looks: int = 10
    seed: int = 0
    text: str | None = None
    label: str | None = None
    download: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.validation < 1:
            raise ConfigError(
                f"validation={self.validation} was asked for.", "It is a share of the data.", "give 0.05 for a twentieth."
            )

    def recipe(self) -> Recipe:
        """Return how long and how fast the students train."""
        return Recipe(
            steps=self.steps,
            lr=self.lr,
            warmup=self.warmup,
            accumulate=self.accumulate,
            precision=self.precision,  # type: ignore[arg-type]
            shard=self.shard,
            compile=self.compile,
            seed=self.seed,
        )

    def reading(self) -> Reading:
        """Return where the data comes from."""
        return Reading(self.data, self.batch, self.tokens, self.validation, self.seed, self.text, self.label, self.download)


def convert(settings: Conversion, out: Path, say: Say = print) -> dict[str, Any]:
    """Carry a conversion out, or go on with it, and return the record that lies in its folder."""
    recipe, student, processes = settings.recipe(), words.student(settings.student), launch.launched()
    dtype = _dtype(settings.dtype)
    main = processes.rank == 0
    say = say if main else _quietly
    if out.exists() and not out.is_dir():
        raise ConfigError(f"a model was to be converted into {out}.", "It is a file.", "name a folder.")
    if pretrained.is_converted(out):
        raise ConfigError(f"a model was to be converted into {out}.", "A finished one lies there.", "give another --out.")
    work = out / "training"
    _same_as_before(settings, work)
    base = open_base(settings.model)
    data = load(base, settings.reading())
    base.model.to(processes.device)
    plan = _plan(settings, base, student)
    if main:
        write_json(dataclasses.asdict(settings), work / "settings.json")
    processes.wait()
    say(f"{settings.model}: {type(base.model).__name__}, {sum(p.numel() for p in base.model.parameters()):,} parameters")
    say(f"{len(select(base.model, plan.sites))} sites; training on {data.train_size}, judged by {data.held_size}")
    original = _judged(base.model, data)
    say(f"original: {_quality(data, original)}")
    try:
        trained = fit(
            base.model,
            plan,
            data.train,
            data.task,
            recipe=recipe,
            validation=data.held,
            scores=data.task.scores,
            folder=work,
            resume=True,
            evaluations=settings.looks,
            on_eval=lambda point: say(_line(data, original, point)),
            progress="converting",
        )
    except (KeyboardInterrupt, SystemExit):
        say(f"The same command goes on, and so does: segue resume {out}")
        raise
    assert trained.handover is not None
    trained.handover.finalize_()
    state = folder.whole_state(base.model)
    record: dict[str, Any] = {}
    if main:
        told = folder.Told(settings, base, data, plan, original, trained)
        record = folder.write(out, told, state, dtype or base.dtype, say)
    processes.wait()
    return record


def _quietly(text: str) -> None:
    """Leave the talking to the first process."""


def _plan(settings: Conversion, base: Base, student: Any) -> Plan:
    if settings.method not in ALL:
        raise ConfigError(
            f"the method {settings.method!r} was asked for.", nearest(settings.method, list(ALL)), "see `segue methods`."
        )
    sites = _sites(settings, base)
    plan = ALL[settings.method](sites=sites, student=student, train=settings.train, seed=settings.seed)
    if base.kind == "encoder":  # there is no task to learn from but what the original returns
        plan = dataclasses.replace(plan, distill=FeatureGuidance(schedule=Constant(alpha=1.0)))
    return plan


def _sites(settings: Conversion, base: Base) -> Selector:
    """Return the sites by their names, without those that are kept; a span stays as it is."""
    wanted = words.sites(settings.sites)
    names = [site.name for site in select(base.model, wanted)]
    if isinstance(wanted, Span) and settings.keep is None:
        return wanted
    kept = {site.name for site in select(base.model, settings.keep)} if settings.keep is not None else set()
    if isinstance(wanted, Span):
        raise SiteError("some layers of a span were to be kept.", "It takes whole groups.", "give it first= and last= instead.")
    if settings.keep is not None and not kept & set(names):
        found = f"{settings.keep!r} matches none of the {len(names)} sites ({names[0]} first)."
        raise SiteError("some sites were to be kept.", found, "a pattern matches whole names, as --sites does.")
    if not set(names) - kept:
        raise SiteError("all sites were to be kept.", "Nothing is left to replace.", "keep fewer.")
    return tuple(name for name in names if name not in kept)


def _judged(model: torch.nn.Module, data: Data) -> dict[str, float]:
    """Score a model alone in this process."""
    device = next(model.parameters()).device
    return Evaluator(data.held, data.task.scores, Processes(device), torch.no_grad)(model)


def _quality(data: Data, scores: dict[str, float]) -> str:
    return f"{data.task.quality} {data.task.of(scores):.4g}{data.task.unit}"


def _line(data: Data, original: dict[str, float], point: dict[str, Any]) -> str:
    parts = {"original": original, "blend": point["blend"], "students": point["students"]}
    shown = ", ".join(f"{name} {data.task.of(scores):.4g}" for name, scores in parts.items())
    return f"step {point['step']}, alpha {point['alpha']:.2f}: {data.task.quality} of {shown}"


def _same_as_before(settings: Conversion, work: Path) -> None:
    path = work / "settings.json"
    if not (path.exists() and (work / "checkpoints" / "latest").exists()):  # what failed at its start may be mended
        return
    before, now = json.loads(path.read_text(encoding="utf-8")), dataclasses.asdict(settings)
    different = [f"{name} {before.get(name)!r}" for name, value in now.items() if before.get(name) != value]
    if different:
        raise ConfigError(
            f"a conversion was to go on in {work.parent}.",
            f"The one that was begun there had {', '.join(different)}.",
            "give the same settings (`segue resume` does), or another --out.",
        )


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    found = getattr(torch, name, None)
    if found not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"weights of type {name!r} were asked for.", "It is none of float32, bfloat16, float16.", "name one.")
    return found  # type: ignore[no-any-return]
