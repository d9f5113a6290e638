"""The folder of a converted model: weights, tokenizer, record, model card and curve, all of it or nothing."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segue.convert import manifest, pretrained, speed
from segue.convert.auto import config_class
from segue.convert.data import Data
from segue.convert.options import Conversion
from segue.convert.pretrained import Base
from segue.convert.recipes import described
from segue.convert.tasks import Task, agreement
from segue.core.tensor_files import full
from segue.phases import adapts, alpha_of
from segue.plan import Plan
from segue.reporting.formatting import duration, memory, significant
from segue.reporting.records import write_json
from segue.schedules import mean_of
from segue.training.distributed import Processes
from segue.training.evaluation import Evaluator
from segue.training.fit import Fit

CONTEXTS = (128, 512, 1024)  # at which the card reports the speed


@dataclass(frozen=True)
class Finished:
    """What is known about a finished conversion."""

    settings: Conversion
    base: Base
    data: Data
    plan: Plan
    original: dict[str, float]  # scores of the original
    trained: Fit
    seen: dict[str, float]  # scores of the original on what evaluations in training read
    others: dict[str, dict[str, float]]  # scores of the original on each of the further files


def evaluated_on(
    model: nn.Module, data: Data, original: nn.Module | None = None, batches: int | None = None
) -> dict[str, dict[str, float]]:
    """Return the scores of a model on each of the further files, or on so many batches of it."""
    return {name: evaluated(model, islice(each, batches), data.task, original) for name, each in data.evaluated_on.items()}


def evaluated(model: nn.Module, batches: Iterable[Any], task: Task, original: nn.Module | None = None) -> dict[str, float]:
    """Return the scores of a model on held-out batches, computed by this process alone."""
    device = next(model.parameters()).device
    return Evaluator(batches, partial(task.scores, original=original), Processes(device), torch.no_grad)(model)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Gather the weights of a model that may be sharded; a weight with two names stays one tensor."""
    gathered: dict[int, Tensor] = {}
    state = model.state_dict(keep_vars=True)
    for value in state.values():
        if id(value) not in gathered:
            gathered[id(value)] = _unshared(full(value).detach().cpu())
    return {name: gathered[id(value)] for name, value in state.items()}


def _unshared(tensor: Tensor) -> Tensor:
    """Copy a tensor that fills only a part of its memory, as gathered shards do."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def write(
    out: Path, finished: Finished, state: dict[str, Tensor], dtype: torch.dtype, say: Callable[[str], None]
) -> dict[str, Any]:
    """Write everything to a draft, load and evaluate that, then move it to its place; return the record."""
    draft = out / ".unfinished"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    _write_model(draft, finished.base, state, dtype)
    record = _record(finished, dtype)
    write_json(record, draft / pretrained.RECORD)
    converted = pretrained.from_pretrained(draft, verify=False)  # its manifest comes last
    original, task = finished.base.reload(), finished.data.task
    scores = evaluated(converted, finished.data.held_out, task, original)
    record["quality"] = {"name": task.quality, "original": finished.original, "converted": scores}
    further = evaluated_on(converted, finished.data, original)
    record["evaluated_on"] = {
        name: {"original": before, "converted": further[name]} for name, before in finished.others.items()
    }
    qualities = [f"{task.of(each):.4g}{task.unit}" for each in (scores, finished.original)]
    say(", ".join(filter(None, (f"as saved: {task.quality} {qualities[0]}, original {qualities[1]}", agreement(scores)))))
    record["speed"] = _speed(finished, {"original": original.to(dtype), "converted": converted})
    write_json({"original": finished.seen, "points": finished.trained.history}, draft / "curve.json")
    draw_curve(draft / "curve.png", task, task.of(finished.seen), finished.trained.history, _alphas(finished))
    write_json(record, draft / pretrained.RECORD)
    digest = manifest.write(draft)
    (draft / manifest.CARD).write_text(card(record, finished.data, digest), encoding="utf-8")
    names = sorted((path.name for path in draft.iterdir()), key=lambda name: name == pretrained.RECORD)
    for name in names:  # the record last: a folder that has it is complete
        os.replace(draft / name, out / name)
    draft.rmdir()
    return record


def _write_model(draft: Path, base: Base, state: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write weights and configuration; not by save_pretrained, which gives weights the names of older checkpoints."""
    from huggingface_hub import save_torch_state_dict

    model: Any = base.model
    cast = {id(x): x.to(dtype) if x.is_floating_point() else x for x in state.values()}
    tied = [name for name in getattr(model, "all_tied_weights_keys", {}) if name in state]  # stored once, as the embedding
    named = {name: cast[id(x)] for name, x in state.items()}
    save_torch_state_dict(named, draft, metadata={"format": "pt"}, shared_tensors_to_discard=tied)
    stored = str(dtype).removeprefix("torch.")
    described = {**base.config, "dtype": stored}
    config_class()(described, architectures=base.config["architectures"], dtype=stored).save_pretrained(draft)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(draft)
    base.save_processor(draft)


def _record(finished: Finished, dtype: torch.dtype) -> dict[str, Any]:
    import transformers

    import segue

    base, settings = finished.base, finished.settings
    examples = finished.trained.total_steps * settings.batch * settings.accumulate
    tokens = settings.tokens if finished.data.packed else None
    return {
        "format": pretrained.FORMAT,
        "segue": base.model.segue,
        "base": {
            "name": base.name,
            "revision": base.revision,
            "hash": base.hash,
            "config": {**base.config, "dtype": str(dtype).removeprefix("torch.")},
        },
        "versions": {
            "segue": segue.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "conversion": described(settings, finished.plan),
        "budget": {
            "steps": finished.trained.total_steps,
            "examples": examples,
            "tokens": tokens and examples * tokens,
            "seconds": finished.trained.seconds,
        },
    }


def _alphas(finished: Finished) -> list[float]:
    """Return the mean alpha of every step."""
    assert finished.trained.handover is not None
    sites, total = finished.trained.handover.sites, finished.trained.total_steps
    if adapts(finished.plan):
        course = mean_of(finished.trained.history)
        return [course(step / total, sites[0]) for step in range(total + 1)]
    return [sum(alpha_of(finished.plan, step / total, site) for site in sites) / len(sites) for step in range(total + 1)]


def _speed(finished: Finished, models: dict[str, Any]) -> dict[str, Any]:
    """Measure both models at their task: generating, or reading."""
    base = finished.base
    if base.reads_images:
        pixels = next(iter(finished.data.held_out))["pixel_values"]
        rows = speed.reading(models, [len(pixels)], make=lambda model, _: {"pixel_values": pixels.to(model.dtype)})
        return {"of": "images at once", "unit": "images", "rows": rows}
    longest = base.positions or CONTEXTS[-1]
    contexts = [context for context in CONTEXTS if context + speed.STEPS < longest] or [max(1, longest - speed.STEPS - 2)]
    if base.kind == "causal":
        return {"of": "tokens read, then generating", "unit": "tokens", "rows": speed.decoding(models, contexts)}
    return {"of": "tokens of one text", "unit": "tokens", "rows": speed.reading(models, contexts)}


def draw_curve(path: Path, task: Task, original: float, points: list[dict[str, Any]], alphas: list[float]) -> None:
    """Draw the quality of original, blend and students over the steps, their distance from the original, and the mean alpha."""
    from matplotlib.figure import Figure

    def draw(axes: Any, points: list[dict[str, Any]], of: Callable[[dict[str, float]], float]) -> None:
        for side, label, colour in (("blend", "blend of both", "#1f77b4"), ("students", "students alone", "#d62728")):
            steps, values = [point["step"] for point in points], [of(point[side]) for point in points]
            axes.plot(steps, values, marker="o", markersize=3, color=colour, label=label)

    compared = [point for point in points if "kl" in point["students"]]  # those of version 0.1.0, and of shards, are not
    heights = (3, 2, 2, 1) if compared else (3, 1)
    figure = Figure(figsize=(6.4, 1.1 * sum(heights)), layout="constrained")
    above, *between, below = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    above.axhline(original, color="#888888", linestyle="--", label="original")
    draw(above, points, task.of)
    if task.quality == "perplexity":
        above.set_yscale("log")
        above.yaxis.set_major_formatter("{x:g}")
        above.yaxis.set_minor_formatter("{x:g}")
        above.tick_params(axis="y", which="minor", labelsize=7)
    above.set_ylabel(f"held-out {task.quality}{task.unit}")
    above.legend(frameon=False)
    if compared:
        draw(between[0], compared, lambda scores: scores["kl"])
        between[0].set_ylabel("KL to the\noriginal, nats")
        draw(between[1], compared, lambda scores: 100 * scores["same_first_choice"])
        between[1].set_ylabel("same first\nchoice (%)")
    below.plot(alphas, color="#555555")
    below.set_ylabel("alpha")
    below.set_xlabel("optimizer step")
    below.set_ylim(-0.05, 1.05)
    for axes in (above, *between, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def card(record: dict[str, Any], data: Data, digest: str) -> str:
    """Return the model card as Markdown, with the front matter of the Hugging Face Hub."""
    conversion, base, budget = record["conversion"], record["base"], record["budget"]
    name, source = _short(base["name"]), _short(conversion["data"])
    sites = record["segue"]["teachers"]
    excluded = f" Left unchanged: `{conversion['exclude']}`." if conversion["exclude"] else ""
    seen = f"{budget['tokens']:,} tokens" if budget["tokens"] else f"{budget['examples']:,} examples"
    batch = conversion["batch"] * conversion["accumulate"]
    return f"""---
library_name: segue
base_model: {name}
tags: [segue, module-replacement]
---

# {name.split("/")[-1]}, converted

{len(sites)} modules of `{name}` are replaced by `{conversion["student"]}`, with [Segue](https://pypi.org/project/segue).

```python
import segue

model = segue.from_pretrained("THIS_FOLDER")  # a plain transformers model, in evaluation mode
```

After `import segue.convert` transformers' Auto classes load it too. Without Segue they refuse it: its modules are not those of
the original.

## Results

{_quality_table(record, data)}
{_speed_table(record)}
![Quality during the conversion](curve.png)

## Conversion

- **Replaced**: `{conversion["sites"]}` ({len(sites)} sites), each by `{conversion["student"]}`.{excluded}
- **Method**: {_method(conversion)}; seed {conversion["seed"]}.{_control(record)}
- **Data**: `{source}`: {data.train_size}; evaluated on {data.held_out_size}, never trained on.
- **Budget**: {budget["steps"]:,} steps of {batch}, {seen}, {duration(budget["seconds"])}.
- **Original**: `{name}`, sha256 of its weights in float32 `{base["hash"][:16]}…`
- **Versions**: {", ".join(f"{name} {version}" for name, version in record["versions"].items())}
{manifest.line(digest)}

`segue.json` has the complete plan, `curve.json` every evaluation during training. This is one conversion with one seed,
evaluated on the data above: other data, longer texts and other seeds give other numbers. `segue eval` compares the two models
further.
"""


def _method(conversion: dict[str, Any]) -> str:
    """Say how the students were trained, and what else."""
    how = f"the plan `{_short(conversion['plan'])}`" if conversion["plan"] else f"`{conversion['method']}`"
    trained = f"students, and LoRA of rank {conversion['lora']} around them" if conversion["lora"] else conversion["train"]
    return f"{how}; trained: {trained}"


def _control(record: dict[str, Any]) -> str:
    if not record["conversion"]["control"]:
        return ""
    said = " **A control**: these students begin as what the original computes, so that nothing is converted;"
    plan = record["segue"]["plan"]
    by_task = bool(plan.get("phases")) and plan.get("guidance") is None and plan.get("distill") is None
    how = f", by the loss of the task: those of `{record['conversion']['method']}` compare with the original" if by_task else ""
    return f"{said} what changes is adaptation to the data{how}."


def _short(name: str) -> str:
    """Shorten the path of a folder or file to its name; ids of the hub stay as they are."""
    return Path(name).name if Path(name).is_absolute() else name


def _quality_table(record: dict[str, Any], data: Data) -> str:
    quality, task = record["quality"], data.task
    before, after = (f"{task.of(quality[which]):.4g}{task.unit}" for which in ("original", "converted"))
    rows = ["| | original | converted |", "|---|---|---|", f"| {quality['name']} | {before} | {after} |"]
    for name in quality["original"]:
        if name != quality["name"]:
            rows.append(f"| {name} | {quality['original'][name]:.4f} | {quality['converted'][name]:.4f} |")
    rows += _distance_rows(quality["converted"])
    for name, further in record["evaluated_on"].items():
        place = f" on `{_short(name)}`"
        before, after = (f"{task.of(further[which]):.4g}{task.unit}" for which in ("original", "converted"))
        rows += [f"| {quality['name']}{place} | {before} | {after} |", *_distance_rows(further["converted"], place)]
    return "\n".join(rows) + "\n"


def _distance_rows(scores: dict[str, float], place: str = "") -> list[str]:
    """Say how far a model is from the original, where that is measured."""
    if "kl" not in scores:
        return []
    return [
        f"| KL divergence from the original{place}, nats | 0 | {significant(scores['kl'])} |",
        f"| same first choice as the original{place} | 100 % | {100 * scores['same_first_choice']:.1f} % |",
    ]


def _speed_table(record: dict[str, Any]) -> str:
    speed = record["speed"]
    lines = ["| speed | original | converted |", "|---|---|---|"]
    for context in sorted({row["context"] for row in speed["rows"]}):
        by = {row["model"]: row for row in speed["rows"] if row["context"] == context}
        cells = [_cell(by[name], speed["unit"]) for name in ("original", "converted")]
        lines.append(f"| {context:,} {speed['of']} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n\nBoth models are measured in turn on the machine of the conversion.\n"


def _cell(row: dict[str, Any], unit: str) -> str:
    cache = f", cache {memory(row['cache_bytes'])}" if "cache_bytes" in row else ""
    return f"{significant(row['tokens_per_second'])} {unit}/s{cache}"
