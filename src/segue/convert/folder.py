"""The folder of a converted model: weights, tokenizer, record, card and curve, all of it or nothing."""

from __future__ import annotations

import copy
import dataclasses
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from segue.checkpoint.folders import hash_file
from segue.convert import card, curve, pretrained, speed
from segue.convert.base import Base
from segue.convert.data import Data
from segue.core.tensor_files import full
from segue.plan import Plan
from segue.reporting.records import write_json
from segue.schedules import alpha_at
from segue.training.distributed import Processes
from segue.training.evaluation import Evaluator
from segue.training.fit import Fit

if TYPE_CHECKING:
    from segue.convert.convert import Conversion

CONTEXTS = (128, 512, 1024)  # at which the card tells the speed


@dataclass(frozen=True)
class Told:
    """What a finished conversion has to tell."""

    settings: Conversion
    base: Base
    data: Data
    plan: Plan
    original: dict[str, float]  # scores before
    trained: Fit


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Gather the weights of a model that may be sharded; what has two names stays one tensor."""
    gathered: dict[int, Tensor] = {}
    state = model.state_dict(keep_vars=True)
    for value in state.values():
        if id(value) not in gathered:
            gathered[id(value)] = _alone(full(value).detach().cpu())
    return {name: gathered[id(value)] for name, value in state.items()}


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor that shares its memory with nothing else: shards are gathered into more than they fill."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def write(out: Path, told: Told, state: dict[str, Tensor], dtype: torch.dtype, say: Callable[[str], None]) -> dict[str, Any]:
    """Write everything beside its place, load it again, judge what was loaded, and move it there; return the record."""
    draft = out / ".unfinished"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    _write_model(draft, told.base, state, dtype)
    record = _record(told, draft, dtype)
    write_json(record, draft / pretrained.RECORD)
    converted = pretrained.from_pretrained(draft)
    scores = Evaluator(told.data.held, told.data.task.scores, Processes(torch.device("cpu")), torch.no_grad)(converted)
    task = told.data.task
    record["quality"] = {"name": task.quality, "original": told.original, "converted": scores}
    say(f"as saved: {task.quality} {task.of(scores):.4g}{task.unit}, original {task.of(told.original):.4g}{task.unit}")
    record["speed"] = _speed(told, {"original": told.base.again().to(dtype), "converted": converted})
    write_json({"original": told.original, "points": told.trained.history}, draft / "curve.json")
    curve.draw(draft / "curve.png", task, task.of(told.original), told.trained.history, _alphas(told))
    (draft / "README.md").write_text(card.text(record, told.data), encoding="utf-8")
    write_json(record, draft / pretrained.RECORD)
    names = sorted((path.name for path in draft.iterdir()), key=lambda name: name == pretrained.RECORD)
    for name in names:  # the record last: a folder that has it is whole
        os.replace(draft / name, out / name)
    draft.rmdir()
    return record


def _write_model(draft: Path, base: Base, state: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write weights and settings; not by save_pretrained, which gives weights the names of older checkpoints."""
    from huggingface_hub import save_torch_state_dict

    model: Any = base.model
    cast = {id(x): x.to(dtype) if x.is_floating_point() else x for x in state.values()}
    tied = [name for name in getattr(model, "all_tied_weights_keys", {}) if name in state]  # stored once, as the embedding
    named = {name: cast[id(x)] for name, x in state.items()}
    save_torch_state_dict(named, draft, metadata={"format": "pt"}, shared_tensors_to_discard=tied)
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = base.config["architectures"]
    if hasattr(config, "quantization_config"):  # of a GGUF file, whose weights are whole now
        del config.quantization_config
    config.save_pretrained(draft)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(draft)
    base.save_reader(draft)


def _record(told: Told, draft: Path, dtype: torch.dtype) -> dict[str, Any]:
    import transformers

    import segue

    base, settings = told.base, told.settings
    weights = [*sorted(path.name for path in draft.glob("*.safetensors")), "config.json"]
    tokens = settings.tokens if base.kind in ("causal", "masked") else None
    return {
        "format": pretrained.FORMAT,
        "segue": base.model.segue,
        "base": {
            "name": base.name,
            "revision": base.revision,
            "hash": base.hash,
            "config": {**base.config, "dtype": str(dtype).removeprefix("torch.")},
        },
        "files": {name: hash_file(draft / name) for name in weights},
        "versions": {
            "segue": segue.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "conversion": dataclasses.asdict(settings),
        "budget": {
            "steps": told.trained.total_steps,
            "examples": told.trained.total_steps * settings.batch * settings.accumulate,
            "tokens": tokens and told.trained.total_steps * settings.batch * settings.accumulate * tokens,
            "seconds": told.trained.seconds,
        },
    }


def _alphas(told: Told) -> list[float]:
    """Return the teacher's mean share at every step."""
    assert told.trained.handover is not None
    sites, total = told.trained.handover.sites, told.trained.total_steps
    return [sum(alpha_at(told.plan.schedule, step / total, site) for site in sites) / len(sites) for step in range(total + 1)]


def _speed(told: Told, models: dict[str, Any]) -> dict[str, Any]:
    """Measure both models at what they are for."""
    base = told.base
    if base.reads_images:
        pixels = next(iter(told.data.held))["pixel_values"]
        rows = speed.reading(models, [len(pixels)], make=lambda model, _: {"pixel_values": pixels.to(model.dtype)})
        return {"of": "images at once", "unit": "images", "rows": rows}
    longest = base.positions or CONTEXTS[-1]
    contexts = [context for context in CONTEXTS if context + speed.STEPS < longest] or [max(1, longest - speed.STEPS - 2)]
    if base.kind == "causal":
        return {"of": "tokens read, then generating", "unit": "tokens", "rows": speed.decoding(models, contexts)}
    return {"of": "tokens of one text", "unit": "tokens", "rows": speed.reading(models, contexts)}
