"""judge(): compare a converted model with its original on text or images that neither was trained on here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segue.convert import compare_causal as judge_causal
from segue.convert import compare_others as judge_others
from segue.convert import evaluation_page as judge_page
from segue.convert import pretrained
from segue.convert.base import Base, open_base
from segue.convert.convert import Conversion
from segue.convert.data import Data, Reading, load
from segue.errors import CheckpointError, ConfigError, DataError
from segue.reporting.palette import require_matplotlib
from segue.reporting.records import meta_info_of, write_json
from segue.training.batches import mapped

FORMAT = 1
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Judging:
    """Everything that a comparison depends on; what is not given is taken from the conversion."""

    folder: Path
    base: str | None = None
    data: str | None = None
    validation: float | None = None  # the share of the data that is held out, and judged by
    contexts: tuple[int, ...] | None = None  # at which speed and memory are measured
    tokens: int | None = None  # of each piece of text
    texts: int | None = None  # at most


def judge(settings: Judging, out: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Compare the two models, write results.json, the figures and index.html, and return the results."""
    require_matplotlib()
    begun, started = datetime.now(timezone.utc), time.monotonic()
    record = pretrained.read_record(settings.folder)
    base = _original(settings, record)
    converted = pretrained.from_pretrained(settings.folder, dtype=torch.float32)
    reading = _reading(settings, record, base)
    data = load(base, reading)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    batches = [mapped(lambda x: x.to(device), batch) for batch in _examples(base, data, settings, reading)]
    models: dict[str, nn.Module] = {"original": base.model.to(device).eval(), "converted": converted.to(device)}
    say(f"{settings.folder} beside {base.name}, judged by {data.held_size} of {reading.data}")
    torch.manual_seed(SEED)
    if base.kind == "causal":
        ids = torch.cat([batch["input_ids"] for batch in batches])
        measured = judge_causal.measure(models, ids, settings.contexts, base.positions)
    else:
        measured = judge_others.measure(models, base, data.task, batches, settings.contexts)
    results = {
        "format": FORMAT,
        "folder": str(settings.folder),
        "kind": base.kind,
        "images": base.reads_images,
        "base": {"name": base.name, "hash": base.hash},
        "replaced": {
            "sites": record["segue"]["plan"]["sites"],
            "student": record["conversion"]["student"],
            "steps": record["budget"]["steps"],
        },
        "data": {
            "name": reading.data,
            "held_out_by_the_conversion": settings.data is None and settings.validation is None,
            "tokens": settings.tokens or reading.tokens,
            "trained_tokens": record["conversion"]["tokens"],
        },
        "parameters": {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()},
        "device": str(device),
        "seed": SEED,
        "timed_steps": judge_causal.STEPS,
        **measured,
        "meta": meta_info_of(begun, 1) | {"seconds": time.monotonic() - started},
    }
    judge_page.write(results, out)
    write_json(results, out / "results.json")
    return results


def sizes(text: str | None) -> tuple[int, ...] | None:
    """Read numbers as one types them.

    >>> sizes("256,1024")
    (256, 1024)
    """
    if text is None:
        return None
    found = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in found):
        raise ConfigError(
            f"the contexts {text!r} were asked for.", "They are not numbers of tokens.", "for example 256,1024,4096."
        )
    return tuple(sorted({int(part) for part in found}))


def _original(settings: Judging, record: Mapping[str, Any]) -> Base:
    """Load the original, and make sure that it is the one that was converted."""
    asked = f"{settings.folder} was to be compared with its original."
    if "conversion" not in record:
        raise CheckpointError(
            asked, f"Its {pretrained.RECORD} was not written by `segue convert`.", "give a folder that it wrote."
        )
    name = settings.base or record["base"]["name"]
    try:
        base = open_base(name)
    except ConfigError as error:
        raise ConfigError(asked, f"{name}: {error.args[1]}", "say with --base where the original lies.") from error
    if base.hash != record["base"]["hash"]:
        found = f"The weights of {name} are others: sha256 {base.hash[:16]}…, not {record['base']['hash'][:16]}…"
        raise CheckpointError(asked, found, "say with --base where the original lies.")
    return base


def _reading(settings: Judging, record: Mapping[str, Any], base: Base) -> Reading:
    """Read as the conversion did, so that what it held out is what is judged by."""
    recorded = Conversion(**record["conversion"]).reading()
    longest = base.positions
    if settings.tokens is not None and longest is not None and settings.tokens > longest:
        raise ConfigError(
            f"texts of {settings.tokens} tokens were asked for.",
            f"{base.name} reads {longest} at most.",
            "give fewer --tokens.",
        )
    changed: dict[str, Any] = {"data": settings.data, "validation": settings.validation}
    if base.kind not in ("causal", "masked"):  # packed texts are cut anew below: another length would hold out another part
        changed["tokens"] = settings.tokens
    return dataclasses.replace(recorded, **{name: value for name, value in changed.items() if value is not None})


def _examples(base: Base, data: Data, settings: Judging, reading: Reading) -> Iterator[dict[str, Tensor]]:
    """Return batches of what is judged by, packed texts in pieces of the length that was asked for."""
    if base.kind not in ("causal", "masked"):
        yield from _at_most(data.held, settings.texts)
        return
    pieces = _cut_anew(data, settings, reading)
    for begin in range(0, len(pieces["input_ids"]), reading.batch):
        yield {name: x[begin : begin + reading.batch] for name, x in pieces.items()}


def _cut_anew(data: Data, settings: Judging, reading: Reading) -> dict[str, Tensor]:
    """Cut the held-out text into pieces of another length: no token of it was trained on."""
    batches = list(data.held)
    streams = {name: torch.cat([batch[name].flatten() for batch in batches]) for name in batches[0]}
    length = settings.tokens or reading.tokens
    count = min(len(stream) // length for stream in streams.values())
    if count < 1:
        raise DataError(
            f"pieces of {length} tokens were asked for.",
            f"{data.held_size.capitalize()} of {reading.data} were held out.",
            "give fewer --tokens, or other --data.",
        )
    pieces = {name: stream[: count * length].reshape(count, length) for name, stream in streams.items()}
    return {name: x[: settings.texts] for name, x in pieces.items()}


def _at_most(batches: Any, most: int | None) -> Iterator[dict[str, Tensor]]:
    left = most
    for batch in batches:
        if left is not None and left <= 0:
            return
        part = {name: x[:left] for name, x in batch.items()}
        yield part
        left = None if left is None else left - len(next(iter(part.values())))
