"""evaluate(): compare a converted model with its original on held-out data."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segue.border import checked
from segue.convert import causal, compare, evaluation_page, harness, pretrained
from segue.convert.data import Data, load, require_positions
from segue.convert.options import Conversion, EvalSettings
from segue.convert.pretrained import Base, open_base
from segue.errors import CheckpointError, ConfigError, DataError
from segue.reporting.palette import require_matplotlib
from segue.reporting.records import meta_info_of, write_json
from segue.training.batches import mapped

FORMAT = 3
SEED = 0


@checked
def evaluate(settings: EvalSettings, out: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Compare the two models, write results.json, the figures and index.html, and return the results."""
    require_matplotlib()
    begun, started = datetime.now(timezone.utc), time.monotonic()
    converted = pretrained.from_pretrained(settings.folder, dtype=torch.float32, digest=settings.digest)
    record = pretrained.read_record(settings.folder)
    base = _original(settings, record)
    tasks = _tasks(settings, base)
    trained = Conversion.from_dict(record["conversion"])
    conversion = _adapted(trained, settings, base)
    data = load(base, conversion, settings.folder / "training")
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    batches = [mapped(lambda x: x.to(device), batch) for batch in examples(base, data, settings, conversion)]
    models: dict[str, nn.Module] = {"original": base.model.to(device).eval(), "converted": converted.to(device)}
    source = conversion.validation if isinstance(conversion.validation, str) else conversion.data
    amount = data.held_out_size if source == conversion.validation else f"{data.held_out_size} of {source}"
    say(f"comparing {settings.folder} with {base.name} on {amount}")
    torch.manual_seed(SEED)
    if base.kind == "causal":
        ids = torch.cat([batch["input_ids"] for batch in batches])
        measured = causal.compare_causal(models, base, ids, settings.contexts, say)
        measured["harness"] = harness.compare(models, base.processor, tasks) if tasks else []
    else:
        measured = compare.compare_others(models, base, data.task, batches, settings.contexts)
    results = {
        "format": FORMAT,
        "folder": str(settings.folder),
        "kind": base.kind,
        "images": base.reads_images,
        "base": {"name": base.name, "hash": base.hash},
        "replaced": {"sites": record["segue"]["plan"]["sites"], "student": trained.student, "steps": record["budget"]["steps"]},
        "data": {
            "name": source,
            "held_out_by_the_conversion": settings.data is None and settings.validation is None,
            "tokens": settings.tokens or conversion.tokens,
            "trained_tokens": trained.tokens,
        },
        "parameters": {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()},
        "device": str(device),
        "seed": SEED,
        "timed_steps": compare.STEPS,
        **measured,
        "meta": meta_info_of(begun, 1) | {"seconds": time.monotonic() - started},
    }
    evaluation_page.write(results, out)
    write_json(results, out / "results.json")
    return results


def _original(settings: EvalSettings, record: Mapping[str, Any]) -> Base:
    """Load the original, and require that its weights are those that were converted."""
    fault = f"{settings.folder} cannot be compared with its original."
    hint = "give the place of the original with --base, or allow its download with --download."
    if "conversion" not in record:
        raise CheckpointError(fault, f"Its {pretrained.RECORD} is not by `segue convert`.", "give a folder that it wrote.")
    name = settings.base or record["base"]["name"]
    try:
        base = open_base(name, download=settings.download)
    except ConfigError as error:
        raise ConfigError(fault, f"{name}: {error.args[1]}", hint) from error
    if base.hash != record["base"]["hash"]:
        found = f"The weights of {name} are different: sha256 {base.hash[:16]}…, not {record['base']['hash'][:16]}…"
        raise CheckpointError(fault, found, hint)
    return base


def _tasks(settings: EvalSettings, base: Base) -> dict[str, Any]:
    """Load the tasks to ask, before anything that takes time."""
    if settings.harness is None:
        return {}
    if base.kind != "causal":
        fault = f"the task {settings.harness!r} cannot be asked."
        raise ConfigError(fault, f"{base.name} does not predict the next token.", "leave --harness out.")
    return harness.load(settings.harness, download=settings.download)


def _adapted(conversion: Conversion, settings: EvalSettings, base: Base) -> Conversion:
    """Read data as the conversion did, so that the same part is held out, except where the settings say otherwise."""
    require_positions(base, settings.tokens or 0)
    # the record may allow a download, which is for the user of this command to say
    changed: dict[str, Any] = {"data": settings.data, "validation": settings.validation, "download": settings.download}
    changed["evaluate_on"] = ()
    if settings.data is not None and settings.validation is None and isinstance(conversion.validation, str):
        changed["validation"] = Conversion.validation  # that file is not of the other data
    if base.kind not in ("causal", "masked"):  # packed texts are cut again later: another length would hold out another part
        changed["tokens"] = settings.tokens
    return dataclasses.replace(conversion, **{name: value for name, value in changed.items() if value is not None})


def examples(base: Base, data: Data, settings: EvalSettings, conversion: Conversion) -> Iterator[dict[str, Tensor]]:
    """Return batches of the held-out data: at most so many examples, packed texts in pieces of the requested length."""
    batches: Any = data.held_out
    if base.kind in ("causal", "masked"):
        pieces = _recut(data, settings.tokens or conversion.tokens, conversion.data)
        count = len(pieces["input_ids"])
        batches = ({name: x[i : i + conversion.batch] for name, x in pieces.items()} for i in range(0, count, conversion.batch))
    yield from _at_most(batches, settings.texts)


def _recut(data: Data, length: int, source: str) -> dict[str, Tensor]:
    """Cut the held-out text into pieces of another length: none of its tokens is trained on."""
    batches = list(data.held_out)
    real = [batch["attention_mask"] > 0 if "attention_mask" in batch else ... for batch in batches]
    names = ["input_ids"] if "attention_mask" in batches[0] else list(batches[0])  # of chats all tokens, without padding
    streams = {
        name: torch.cat([batch[name][tokens].flatten() for batch, tokens in zip(batches, real, strict=True)]) for name in names
    }
    available = min(map(len, streams.values()))
    if available < length:
        found, hint = f"Held out are {data.held_out_size} of {source}.", "give fewer --tokens, or other --data."
        raise DataError(f"tokens must be at most {available}, got {length}.", found, hint)
    count = available // length
    return {name: stream[: count * length].reshape(count, length) for name, stream in streams.items()}


def _at_most(batches: Any, most: int | None) -> Iterator[dict[str, Tensor]]:
    left = most
    for batch in batches:
        if left is not None and left <= 0:
            return
        part = {name: x[:left] for name, x in batch.items()}
        yield part
        left = None if left is None else left - len(next(iter(part.values())))
