"""Data for a conversion: batches to train on, and a held-out part to evaluate on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from segue.convert import chat
from segue.convert.options import Conversion
from segue.convert.pretrained import Base
from segue.convert.sampling import SELF, Samples
from segue.convert.tasks import IGNORED, HiddenToken, Labels, NextToken, Outputs, Task, embedded
from segue.convert.texts import Texts, columns, read_rows
from segue.data.augment import normalise
from segue.data.dataset import Dataset
from segue.data.hub import HubDataset, ImageFolder
from segue.errors import ConfigError, DataError
from segue.training.batches import Batches, InOrder
from segue.training.distributed import Processes

MAX_HELD_OUT = 256  # examples: enough to tell models apart, few enough for frequent evaluations
HIDDEN_FRACTION = 0.15  # of the tokens that a masked language model has to predict


@dataclass
class Data:
    """A task with its data in memory."""

    task: Task
    train: Batches
    held_out: Iterable[Any]  # batches, the same every time
    train_size: str  # as text, such as "12 images"
    held_out_size: str
    evaluated_on: dict[str, Iterable[Any]] = field(default_factory=dict)  # batches of further files to evaluate on
    packed: bool = False  # every example has as many tokens as the settings say
    prepare: Callable[[Callable[[str], None]], None] = field(default=lambda say: None)  # noqa: ARG005  # what takes long


@dataclass(frozen=True)
class Examples:
    """What is read from one source."""

    count: int
    make: Callable[[Tensor, torch.Generator], dict[str, Tensor]]  # (which, the batch's own randomness) -> batch
    amount: Callable[[int], str]  # so many of them as text
    detail: str  # that follows it
    task: Task
    unit: str = "texts"
    packed: bool = False  # into pieces of the same length; neighbours belong together, so that the end is held out

    def batches(self, places: Tensor, size: int) -> InOrder:
        """Return batches in a fixed order, the same every time."""
        return InOrder(
            len(places), size, lambda chosen: self.make(places[chosen], torch.Generator().manual_seed(int(chosen[0])))
        )


def load(
    base: Base,
    settings: Conversion,
    folder: Path | None = None,
    processes: Processes | None = None,
    *,
    dry_run: bool = False,
) -> Data:
    """Load the data that a model is trained and evaluated on.

    What is sampled from the model itself is kept in `folder`: all of it by `Data.prepare`, otherwise when it is needed. A
    `dry_run` samples one batch.
    """
    if base.reads_images:
        return _images(base, settings)
    if settings.data == SELF:
        samples = Samples(base, settings, folder, processes, dry_run=dry_run)
        found, (train, held_out) = _sampled(base, settings, samples)
    else:
        found = _examples(base, settings, settings.data)
        train, held_out = _parts(found, settings)
    evaluated = found.batches(held_out, settings.batch)
    held_size = f"the last {found.amount(len(held_out))}" if found.packed else found.amount(len(held_out))
    if settings.data == SELF:
        held_size = f"{found.amount(len(held_out))} of other sequences"
    if isinstance(settings.validation, str):
        evaluated, held_size = _all_of(base, settings, settings.validation)
    others = {name: _with_targets(base, _all_of(base, settings, name)[0]) for name in settings.evaluate_on}
    batches = Batches(len(train), settings.batch, lambda chosen, noise: found.make(train[chosen], noise), seed=settings.seed)
    size, held_out_batches = found.amount(len(train)) + found.detail, _with_targets(base, evaluated)
    data = Data(found.task, batches, held_out_batches, size, held_size, others, packed=found.packed)
    if settings.data == SELF:
        data.prepare = partial(samples.sample, found.count)
    return data


def _parts(found: Examples, settings: Conversion) -> tuple[Tensor, Tensor]:
    """Divide examples into those to train on and those that are held out."""
    held = 0
    if not isinstance(settings.validation, str):
        held = min(MAX_HELD_OUT, max(1, round(settings.validation * found.count)))
    if found.count - held < 1:
        hint = "give more data, or shorter pieces (--tokens)."
        raise DataError(f"{settings.data} is too small to train on.", f"It makes {found.count} {found.unit}.", hint)
    if found.packed:
        order = torch.arange(found.count)
        return order[: found.count - held], order[found.count - held :]
    order = torch.randperm(found.count, generator=torch.Generator().manual_seed(0))  # files are often sorted
    return order[held:], order[:held]


def _all_of(base: Base, settings: Conversion, source: str) -> tuple[InOrder, str]:
    """Return the first examples of another source, as batches and as text."""
    found = _examples(base, settings, source)
    if not found.count:
        hint = "give more data, or shorter pieces (--tokens)."
        raise DataError(f"{source} is too small to evaluate on.", f"It makes 0 {found.unit}.", hint)
    count = min(found.count, MAX_HELD_OUT)
    return found.batches(torch.arange(count), settings.batch), f"{found.amount(count)} of {Path(source).name}"


def _examples(base: Base, settings: Conversion, source: str) -> Examples:
    """Read texts, or chats, as the model reads them."""
    rows = read_rows(source, download=settings.download)
    first = list(islice(rows, 1))
    rows = chain(first, rows)
    if base.kind == "causal" and settings.text is None and first and chat.is_chat(first[0]):
        require_positions(base, settings.tokens)
        chats = chat.encoded(base, rows, source, settings.tokens)
        make = lambda chosen, _: chats.batch(chosen)  # noqa: E731
        return Examples(len(chats), make, lambda count: f"{count:,} chats", chats.detail, NextToken(), "chats")
    found = columns(source, rows, settings.text, settings.label, base.class_names)
    return _packed(base, found, settings) if base.kind in ("causal", "masked") else _sentences(base, found, settings, source)


def require_positions(base: Base, tokens: int) -> None:
    """Refuse texts that are longer than the model has positions for."""
    if base.positions is not None and tokens > base.positions:
        fault, found = f"tokens must be at most {base.positions}, got {tokens}.", f"{base.name} has {base.positions} positions."
        raise ConfigError(fault, found, f"give --tokens {base.positions}, or fewer.")


def _packed(base: Base, found: Texts, settings: Conversion) -> Examples:
    """Join all texts, an end mark after each, and cut them into pieces of the same length."""
    require_positions(base, settings.tokens)
    end = base.processor.eos_token_id if base.processor.eos_token_id is not None else base.processor.sep_token_id
    stream: list[int] = []
    for ids in base.processor(found.texts, add_special_tokens=False, verbose=False)["input_ids"]:
        stream += ids if end is None else [*ids, end]
    blocks = torch.tensor(stream[: len(stream) // settings.tokens * settings.tokens]).reshape(-1, settings.tokens)
    detail, unit = f" in pieces of {settings.tokens}", f"pieces of {settings.tokens} tokens"

    def amount(count: int) -> str:
        return f"{count * settings.tokens:,} tokens"

    if base.kind == "causal":
        make = lambda chosen, _: {"input_ids": blocks[chosen]}  # noqa: E731
        return Examples(len(blocks), make, amount, detail, NextToken(), unit, packed=True)
    mask = base.processor.mask_token_id
    if mask is None:
        raise DataError(f"{base.name} cannot predict hidden tokens.", "Its tokenizer has no mask token.", "use another model.")

    def hidden(places: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        ids = blocks[places]
        order = torch.rand(ids.shape, generator=generator).argsort(dim=1)
        chosen = order < max(1, round(HIDDEN_FRACTION * ids.shape[1]))  # the same number in every text, for equal weights
        return {"input_ids": ids.masked_fill(chosen, mask), "labels": ids.masked_fill(~chosen, IGNORED)}

    return Examples(len(blocks), hidden, amount, detail, HiddenToken(), unit, packed=True)


def _sampled(base: Base, settings: Conversion, samples: Samples) -> tuple[Examples, tuple[Tensor, Tensor]]:
    """Sample sequences from the model itself; those that are held out come after those to train on."""
    require_positions(base, settings.tokens)
    train = samples.count
    held = 0
    if not isinstance(settings.validation, str):
        held = min(MAX_HELD_OUT, max(1, round(settings.validation * train / (1 - settings.validation))))
    found = Examples(
        train + held,
        lambda chosen, _: {"input_ids": samples[chosen]},
        lambda count: f"{count * settings.tokens:,} tokens",
        f" in sequences of {settings.tokens}, sampled from the original {samples.start_text}",
        NextToken(),
        packed=True,
    )
    order = torch.arange(train + held)
    return found, (order[:train], order[train:])


def _sentences(base: Base, found: Texts, settings: Conversion, source: str) -> Examples:
    """Take every text as one example, padded to the longest of its batch."""
    longest = min(settings.tokens, base.positions or settings.tokens, base.processor.model_max_length)
    if len(found) == 1 and found.labels is None:  # a plain text file has one text per line
        found = Texts([line for line in found.texts[0].splitlines() if line.strip()])
    labelled = base.kind == "labels"
    if labelled:
        _require_labels(base, found.labels, source)

    def encoded(places: Tensor, _: torch.Generator) -> dict[str, Tensor]:
        batch = [found.texts[i] for i in places.tolist()]
        tokens = base.processor(batch, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        answers = {"labels": torch.tensor([found.labels[i] for i in places.tolist()])} if labelled and found.labels else {}
        return {**tokens, **answers}

    task = Labels() if labelled else Outputs()
    return Examples(len(found), encoded, lambda count: f"{count:,} texts", f" of at most {longest} tokens", task)


def _images(base: Base, settings: Conversion) -> Data:
    """Prepare images by the model's own settings; the test part of the data is held out."""
    if others := [*settings.evaluate_on, *([settings.validation] if isinstance(settings.validation, str) else [])]:
        found = "A folder or dataset of images has a part of its own for that, test or val."
        raise ConfigError(f"images cannot be held out from {others[0]!r}.", found, "leave that option out.")
    data = _image_source(base, settings)()
    shape = tuple(base.processor["image_mean"]), tuple(base.processor["image_std"]), int(base.model.config.image_size)  # type: ignore[arg-type, union-attr]
    number = _numbering(base, settings, data.classes)
    if base.kind == "labels":
        _require_labels(base, number.tolist(), settings.data)

    def batch(part: Any, chosen: Tensor) -> dict[str, Tensor]:
        pixels = {"pixel_values": normalise(part.inputs[chosen], *shape)}
        return {**pixels, "labels": number[part.labels[chosen]]} if base.kind == "labels" else pixels

    held = min(len(data.test), MAX_HELD_OUT)
    held_out = torch.randperm(len(data.test), generator=torch.Generator().manual_seed(0))[:held]  # files are in order of class
    batches = Batches(len(data.train), settings.batch, lambda chosen, _: batch(data.train, chosen), seed=settings.seed)
    described = f"{len(data.train):,} images", f"{held:,} images"
    evaluated = InOrder(held, settings.batch, lambda chosen: batch(data.test, held_out[chosen]))
    task = Labels() if base.kind == "labels" else Outputs()
    return Data(task, batches, _with_targets(base, evaluated), *described)


def _numbering(base: Base, settings: Conversion, classes: int) -> Tensor:
    """Return the model's index of every class: folders named as its classes get its indices."""
    train = Path(settings.data).expanduser() / "train"
    folders = sorted(path.name for path in train.iterdir() if path.is_dir()) if train.is_dir() else []
    if folders and all(name in base.class_names for name in folders):
        return torch.tensor([base.class_names[name] for name in folders])
    return torch.arange(classes)


def _image_source(base: Base, settings: Conversion) -> Callable[[], Dataset]:
    if (Path(settings.data).expanduser() / "train").is_dir():
        return ImageFolder(folder=settings.data, size=int(base.model.config.image_size))  # type: ignore[arg-type, union-attr]
    return HubDataset(id=settings.data, label=settings.label or "label", download=settings.download)


def _with_targets(base: Base, held_out: InOrder) -> Iterable[Any]:
    """Add what an encoder returns now, which is what it has to return in the end."""
    if base.kind != "encoder":
        return held_out
    with torch.no_grad():
        return [{**batch, "targets": embedded(base.model, batch)} for batch in held_out]


def _require_labels(base: Base, labels: list[int] | None, data: str) -> None:
    classes = int(base.model.config.num_labels)  # type: ignore[arg-type, union-attr]
    fault = f"{data} does not fit {base.name}, which has {classes} classes."
    if labels is None:
        raise DataError(fault, "It has no label column.", "name it with --label.")
    if not 0 <= min(labels) <= max(labels) < classes:
        raise DataError(fault, f"Its labels go from {min(labels)} to {max(labels)}.", "number them as the model does.")
