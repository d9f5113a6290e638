"""One run: a teacher, a replacement, a result."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segue import similarity
from segue.border import checked
from segue.checkpoint import state as checkpoint
from segue.checkpoint.lock import locked_on_rank_0
from segue.core.backbone import evaluating
from segue.core.blending import first_floating, padding_mask
from segue.core.handover import Handover
from segue.core.steps_taken import StepsTaken
from segue.core.tensor_files import full
from segue.diagnostics.costs import Cost, cost
from segue.diagnostics.recorder import Recorder
from segue.errors import ConfigError
from segue.lab.config import Run, config_hash, to_dict
from segue.lab.tasks import Loaded
from segue.lab.teachers import scores_of, teacher_model, teachers_of
from segue.reporting import records as results
from segue.reporting.records import Point, Result, RunInfo, TrainInfo, meta_info_of, removed_on_failure
from segue.sites import Site, select
from segue.training.batches import Batches, mapped
from segue.training.distributed import Processes, launched
from segue.training.evaluation import Evaluator
from segue.training.fit import Fit, fit
from segue.training.tasks import LossFn

DRIFT_EXAMPLES = 64
MINIBATCHES = 4  # of training data, for the variance of gradients


@checked
def run(
    config: Run,
    folder: Path,
    *,
    keep_model: bool = False,
    trackers: tuple[str, ...] = (),
    wait: bool = False,
    resume: Path | None = None,
    allow_changes: Sequence[str] = (),
) -> Result:
    """Carry out a run in a folder, resume it, or read its result if it has finished.

    Another process that works in the folder is an error; with `wait` it is waited for. `resume` is the checkpoint to take
    instead of the latest, `allow_changes` what may differ from it.
    """
    processes = launched()
    if is_finished(config, folder):
        if resume is not None:
            raise ConfigError(
                f"the run in {folder} does not resume from {resume}.",
                "It is finished: its result is there.",
                f"read the result, or delete {folder / results.FILE} to train again from that checkpoint.",
            )
        return results.read(folder / results.FILE)
    made = ("config.json", results.BEGUN, "metrics.jsonl", "checkpoints") if processes.rank == 0 else ()
    with locked_on_rank_0(folder, wait=wait), removed_on_failure(folder, *made):
        given: dict[str, Any] = {"resume": resume or True, "allow_changes": allow_changes, "trackers": trackers}
        return _run(config, folder, processes, keep_model=keep_model, **given)


def _run(config: Run, folder: Path, processes: Processes, *, keep_model: bool, **settings: Any) -> Result:
    if is_finished(config, folder):  # by now: another process was waited for
        return results.read(folder / results.FILE)
    if processes.rank == 0:
        results.write_json({"config_hash": config_hash(config), "config": to_dict(config)}, folder / "config.json")
    processes.wait()
    begun = datetime.now(timezone.utc)
    loaded = config.task.load(data_fraction=config.data_fraction, seed=config.seed)
    everything = config.teacher.task.load() if config.data_fraction < 1 or config.teacher.task != config.task else loaded
    teachers = teachers_of(config.teacher, folder)
    model, teacher = teacher_model(config.teacher, teachers, everything)
    autocast = partial(_autocast, processes.device, config.recipe.precision)
    evaluate = partial(Evaluator, scores=config.task.loss.scores, processes=processes, autocast=autocast)
    model.to(processes.device)
    complete = loaded.final is loaded.validation  # evaluations use all held-out examples: there is nothing more to measure
    original = partial(_original, config, folder, everything)
    teacher_eval = evaluate(loaded.validation)(model)
    if config.teacher.task == config.task and "scores" in teacher:
        teacher_final = teacher["scores"]
    elif complete:
        teacher_final = teacher_eval
    else:
        about = {name: to_dict(getattr(config, name)) for name in ("task", "data_fraction", "seed")}
        about["precision"] = config.recipe.precision
        teacher_final = scores_of(model, about, teachers, evaluate(loaded.final))
    batches = loaded.train(config.batch, config.seed)
    bill = _cost(config, model, batches)
    flops = _before_each_step(config, bill)
    expected = replace(_expected(config, model, batches, bill), teacher=teacher_final, teacher_eval=teacher_eval)
    run_info = _run_info(config, folder)
    if processes.rank == 0:
        results.write_begun(
            Result(run_info=run_info, train_info=expected, meta_info=meta_info_of(begun, processes.world)), folder
        )
    fitted = _replace(config, loaded, batches, model, folder, flops, **settings)
    assert fitted.handover is not None
    if fitted.steps_taken is not None:  # the bill above is that of the plan alone
        first = loaded.train(config.batch, config.seed)  # the others are where the training has left them
        bill = _cost(config, original().to(processes.device), first, fitted.steps_taken)
        flops = _before_each_step(config, bill)
        expected = replace(expected, **_counted(config, bill))
    trains_to_end = config.recipe.ema is None and config.recipe.early_stopping is None  # else the weights change after it
    last: dict[str, Any] = fitted.history[-1] if fitted.history else {"step": None}  # a damaged log may have lost it
    with fitted.handover.as_student():
        known = complete and trains_to_end and last["step"] == fitted.total_steps
        final = last["students"] if known else evaluate(loaded.final)(model)
    train_info = replace(
        expected,
        points=[_point(point, flops) for point in fitted.history],
        final=final,
        seconds=fitted.seconds,
        flops=flops[fitted.stopped_at or fitted.total_steps],
        peak_memory=_peak_memory(processes.device),
        skipped_steps=fitted.skipped,
        stopped_at=fitted.stopped_at,
        best_step=fitted.best_step,
    )
    result = Result(run_info=run_info, train_info=train_info, meta_info=meta_info_of(begun, processes.world))
    if keep_model:
        parts = ("student", "adapter", "gate", "schedule", "guidance", "distill", "phases")
        own = {part: getattr(config.plan, part) for part in parts}
        handover: Handover = checkpoint.load_(original(), folder / "checkpoints", **own)  # a lambda cannot be saved by name
        if config.recipe.ema is not None or config.recipe.early_stopping is not None:  # the checkpoint holds the last weights
            handover.model.load_state_dict({name: full(value) for name, value in fitted.model.state_dict().items()})
        checkpoint.save(handover.finalize_(force=True), folder / "model")
    if processes.rank == 0:
        results.write(result, folder)
        (folder / results.BEGUN).unlink(missing_ok=True)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    processes.wait()
    return result


def _original(config: Run, folder: Path, everything: Loaded) -> nn.Module:
    """Return the teacher as it was before the replacement: the model of a run may be sharded, or without its teachers."""
    return teacher_model(config.teacher, teachers_of(config.teacher, folder), everything)[0]


def is_finished(config: Run, folder: Path) -> bool:
    """Return whether a run has its result; refuse a folder that belongs to another configuration."""
    path = folder / "config.json"
    if path.exists() and (there := results.read_json(path, "config_hash")["config_hash"]) != config_hash(config):
        raise ConfigError(
            f"{folder} belongs to another run than {config.name!r}.",
            f"Its configuration has the hash {there}, not {config_hash(config)}.",
            "choose another --out, or delete that folder if you no longer want its results.",
        )
    return (folder / results.FILE).exists()


def _expected(config: Run, model: nn.Module, batches: Any, bill: Cost) -> TrainInfo:
    """Return what is known of a run before it trains."""
    return TrainInfo(
        score=config.task.score,
        total_steps=config.recipe.total_steps(len(batches)),
        steps_per_epoch=max(1, len(batches) // config.recipe.accumulate),
        sites=[site.name for site in select(model, config.plan.sites)],
        teacher={},
        teacher_eval={},
        points=[],
        final={},
        seconds=0.0,
        flops=0.0,
        peak_memory=0,
        **_counted(config, bill),
    )


def _counted(config: Run, bill: Cost) -> dict[str, Any]:
    """Return what a result says of the operations of single steps."""
    micro = config.recipe.accumulate
    steps = {
        "students": micro * float(bill.student_only.flops),
        "blend": micro * float(max(bill.per_step[1:] or bill.per_step)),  # the first step also compares the two sides
        "teacher_pass": micro * float(bill.teacher_pass),
    }
    return {"step_flops": steps, "cost": bill.to_dict()}


def _replace(
    config: Run, loaded: Loaded, batches: Any, model: nn.Module, folder: Path, flops: Sequence[float], **settings: Any
) -> Fit:
    """Train the replacement."""
    device = next(model.parameters()).device
    few = next(iter(loaded.validation))
    few = mapped(lambda tensor: tensor[:DRIFT_EXAMPLES].to(device), few)
    drift = Drift(model, select(model, config.plan.sites), few, config.task.loss)
    diagnostics = () if config.alone else config.diagnostics
    recorder = Recorder(islice(batches, MINIBATCHES), config.task.loss, diagnostics)
    return fit(
        model,
        config.plan,
        batches,
        config.task.loss,
        recipe=config.recipe,
        validation=loaded.validation,
        folder=folder,
        evaluations=config.evaluations,
        measure=lambda handover: drift(handover) | recorder(handover) | {"flops": flops[handover.steps_done]},
        progress=config.name,
        **settings,
    )


def _cost(config: Run, model: nn.Module, batches: Any, steps_taken: StepsTaken | None = None) -> Cost:
    """Count a run before it begins, or as it was."""
    device = next(model.parameters()).device
    first = batches.typical() if isinstance(batches, Batches) else next(iter(batches))
    example = mapped(lambda tensor: tensor.to(device), first)
    total = config.recipe.total_steps(len(batches))
    return cost(model, config.plan, example, total_steps=total, loss_fn=config.task.loss, steps_taken=steps_taken)


def _before_each_step(config: Run, bill: Cost) -> list[float]:
    """Return the operations that a run has done before each step, and after the last."""
    return [0.0, *accumulate(config.recipe.accumulate * one for one in bill.per_step)]


def _autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Compute as the training does, so that its numbers and ours can be compared."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)


def _point(point: dict[str, Any], flops: list[float]) -> Point:
    known = {name: value for name, value in point.items() if name in Point.__dataclass_fields__}
    return Point(**known | {"flops": float(flops[point["step"]])})


def _run_info(config: Run, folder: Path) -> RunInfo:
    return RunInfo(
        experiment=config.experiment,
        name=folder.name,
        method=config.method,
        label=config.label,
        group=config.group,
        seed=config.seed,
        config=to_dict(config),
        config_hash=config_hash(config),
        reference=config.reference,
        choice=None if config.choice is None else asdict(config.choice),
    )


def _peak_memory(device: torch.device) -> int:
    """Return the most bytes in use so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


class Drift:
    """How far the stream after each replaced block is from that of the untouched model, on a fixed batch."""

    def __init__(self, model: nn.Module, sites: list[Site], batch: Any, loss_fn: LossFn) -> None:
        self.sites = sites
        self.batch = batch
        self.loss_fn = loss_fn
        self.untouched = self._outputs(model)

    def __call__(self, handover: Handover) -> dict[str, dict[str, float]]:
        """Return the relative squared distance after the block of every site, of the blend and of the students alone."""
        blend = self._distances(handover.model)
        if all(seam.closed for seam in handover.seams.values()):  # the students are alone already
            return {"drift_blend": blend, "drift_students": blend}
        with handover.as_student():
            students = self._distances(handover.model)
        return {"drift_blend": blend, "drift_students": students}

    def _distances(self, model: nn.Module) -> dict[str, float]:
        mask = padding_mask(self.batch)
        return {
            name: similarity.relative_error(self.untouched[name], output, mask).mean().item()
            for name, output in self._outputs(model).items()
        }

    @torch.no_grad()
    def _outputs(self, model: nn.Module) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = {}

        def keep(site: Site) -> Any:
            def after(module: nn.Module, args: Any, output: Any) -> None:
                outputs[site.name] = first_floating(output, site)

            return after

        handles = [model.get_submodule(block_of(site.members[-1])).register_forward_hook(keep(site)) for site in self.sites]
        try:
            with evaluating(model):
                self.loss_fn(model, self.batch)
        finally:
            for handle in handles:
                handle.remove()
        return outputs


def block_of(site: str) -> str:
    """Return the name of the block that contains a site: up to the last number in its name, or the site itself.

    >>> block_of("blocks.3.attn"), block_of("encoder.layer.0.attention.self"), block_of("mixer")
    ('blocks.3', 'encoder.layer.0', 'mixer')
    """
    parts = site.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else site
