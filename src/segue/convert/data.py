"""Data for a conversion: batches to train on, and a part held out to judge by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from segue.convert import texts
from segue.convert.base import Base
from segue.convert.tasks import IGNORED, HiddenToken, Labels, NextToken, Outputs, Task, embedded
from segue.data.augment import normalise
from segue.data.dataset import Dataset
from segue.data.hub import HubDataset, ImageFolder
from segue.errors import ConfigError, DataError
from segue.training.batches import Batches, InOrder

MOST_HELD = 256  # examples: enough to tell models apart, few enough to be looked at often
HIDDEN_SHARE = 0.15  # of the tokens that a masked language model has to guess


@dataclass
class Data:
    """A task with its data in memory."""

    task: Task
    train: Batches
    held: Iterable[Any]  # batches, the same every time
    train_size: str  # in words
    held_size: str


@dataclass(frozen=True)
class Reading:
    """Where the data comes from and how it is cut up."""

    data: str
    batch: int
    tokens: int
    validation: float  # the share that is held out
    seed: int
    text: str | None = None
    label: str | None = None
    download: bool = False


def load(base: Base, reading: Reading) -> Data:
    """Load what a model can be trained on."""
    if base.reads_images:
        return _images(base, reading)
    names = base.class_names
    found = texts.read(reading.data, text=reading.text, label=reading.label, download=reading.download, names=names)
    return _packed(base, found, reading) if base.kind in ("causal", "masked") else _sentences(base, found, reading)


def _packed(base: Base, found: texts.Texts, reading: Reading) -> Data:
    """Join all texts, an end mark after each, and cut them into pieces of the same length."""
    if base.positions is not None and reading.tokens > base.positions:
        raise ConfigError(
            f"pieces of {reading.tokens} tokens were asked for.",
            f"{base.name} was made for {base.positions} at most.",
            f"give --tokens {base.positions}, or fewer.",
        )
    end = base.reader.eos_token_id if base.reader.eos_token_id is not None else base.reader.sep_token_id
    stream: list[int] = []
    for ids in base.reader(found.texts, add_special_tokens=False, verbose=False)["input_ids"]:
        stream += ids if end is None else [*ids, end]
    blocks = torch.tensor(stream[: len(stream) // reading.tokens * reading.tokens]).reshape(-1, reading.tokens)
    held = _held(len(blocks), reading, f"pieces of {reading.tokens} tokens")
    train, judged = blocks[:-held], blocks[-held:]  # the end of the text, so that no piece of it was seen
    words = f"{train.numel():,} tokens in pieces of {reading.tokens}", f"the last {judged.numel():,} tokens"
    if base.kind == "causal":
        batches = _batches(len(train), reading, lambda chosen, _: {"input_ids": train[chosen]})
        return Data(NextToken(), batches, InOrder(held, reading.batch, lambda chosen: {"input_ids": judged[chosen]}), *words)
    mask = base.reader.mask_token_id
    if mask is None:
        raise DataError(f"{base.name} was to guess hidden tokens.", "Its tokenizer has no mask token.", "use another model.")

    def hidden(ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        order = torch.rand(ids.shape, generator=generator).argsort(dim=1)
        chosen = order < max(1, round(HIDDEN_SHARE * ids.shape[1]))  # as many in every text, so that means can be averaged
        return {"input_ids": ids.masked_fill(chosen, mask), "labels": ids.masked_fill(~chosen, IGNORED)}

    def fixed(chosen: Tensor) -> dict[str, Tensor]:
        return hidden(judged[chosen], torch.Generator().manual_seed(int(chosen[0])))

    batches = _batches(len(train), reading, lambda chosen, generator: hidden(train[chosen], generator))
    return Data(HiddenToken(), batches, InOrder(held, reading.batch, fixed), *words)


def _sentences(base: Base, found: texts.Texts, reading: Reading) -> Data:
    """Take every text for itself, padded to the longest of its batch."""
    longest = min(reading.tokens, base.positions or reading.tokens, base.reader.model_max_length)
    found = _lines(found) if len(found) == 1 and found.labels is None else found
    labelled = base.kind == "labels"
    if labelled:
        _require_labels(base, found.labels, reading)
    held = _held(len(found), reading, "texts")

    def encoded(places: Tensor) -> dict[str, Tensor]:
        batch = [found.texts[i] for i in places.tolist()]
        tokens = base.reader(batch, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        answers = {"labels": torch.tensor([found.labels[i] for i in places.tolist()])} if labelled and found.labels else {}
        return {**tokens, **answers}

    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))  # files are often sorted
    train, judged = order[held:], order[:held]
    batches = _batches(len(train), reading, lambda chosen, _: encoded(train[chosen]))
    words = f"{len(train):,} texts of at most {longest} tokens", f"{held:,} texts"
    return _with_task(base, batches, InOrder(held, reading.batch, lambda chosen: encoded(judged[chosen])), words)


def _images(base: Base, reading: Reading) -> Data:
    """Take images as the model's own settings say; the source's test part is held out."""
    data = _image_source(base, reading)()
    shape = tuple(base.reader["image_mean"]), tuple(base.reader["image_std"]), int(base.model.config.image_size)  # type: ignore[arg-type, union-attr]
    number = _numbering(base, reading, data.classes)
    if base.kind == "labels":
        _require_labels(base, number.tolist(), reading)

    def batch(part: Any, chosen: Tensor) -> dict[str, Tensor]:
        pixels = {"pixel_values": normalise(part.inputs[chosen], *shape)}
        return {**pixels, "labels": number[part.labels[chosen]]} if base.kind == "labels" else pixels

    held = min(len(data.test), MOST_HELD)
    judged = torch.randperm(len(data.test), generator=torch.Generator().manual_seed(0))[:held]  # files come class by class
    batches = _batches(len(data.train), reading, lambda chosen, _: batch(data.train, chosen))
    words = f"{len(data.train):,} images", f"{held:,} images"
    return _with_task(base, batches, InOrder(held, reading.batch, lambda chosen: batch(data.test, judged[chosen])), words)


def _numbering(base: Base, reading: Reading, classes: int) -> Tensor:
    """Return the model's number of every class: folders that have the names of its classes are numbered as it does."""
    train = Path(reading.data).expanduser() / "train"
    folders = sorted(path.name for path in train.iterdir() if path.is_dir()) if train.is_dir() else []
    if folders and all(name in base.class_names for name in folders):
        return torch.tensor([base.class_names[name] for name in folders])
    return torch.arange(classes)


def _image_source(base: Base, reading: Reading) -> Callable[[], Dataset]:
    if (Path(reading.data).expanduser() / "train").is_dir():
        return ImageFolder(folder=reading.data, size=int(base.model.config.image_size))  # type: ignore[arg-type, union-attr]
    return HubDataset(id=reading.data, label=reading.label or "label", download=reading.download)


def _with_task(base: Base, train: Batches, held: InOrder, words: tuple[str, str]) -> Data:
    if base.kind == "labels":
        return Data(Labels(), train, held, *words)
    with torch.no_grad():
        judged = [{**batch, "targets": embedded(base.model, batch)} for batch in held]
    return Data(Outputs(), train, judged, *words)


def _batches(count: int, reading: Reading, make: Callable[[Tensor, torch.Generator], Any]) -> Batches:
    return Batches(count, reading.batch, make, seed=reading.seed)


def _held(count: int, reading: Reading, what: str) -> int:
    held = min(MOST_HELD, max(1, round(reading.validation * count)))
    if count - held < 1:
        raise DataError(
            f"{reading.data} was to be trained on.",
            f"It makes {count} {what}.",
            "give more data, or shorter pieces (--tokens).",
        )
    return held


def _lines(found: texts.Texts) -> texts.Texts:
    """Take a plain text file as one text per line."""
    return texts.Texts([line for line in found.texts[0].splitlines() if line.strip()])


def _require_labels(base: Base, labels: list[int] | None, reading: Reading) -> None:
    classes = int(base.model.config.num_labels)  # type: ignore[arg-type, union-attr]
    asked = f"{reading.data} was to be used for {base.name}, which names {classes} classes."
    if labels is None:
        raise DataError(asked, "It has no column of labels.", "name it with --label.")
    if not 0 <= min(labels) <= max(labels) < classes:
        raise DataError(asked, f"Its labels go from {min(labels)} to {max(labels)}.", "number them as the model does.")
