"""Data for a conversion: batches to train on, and a held-out part to evaluate on."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from segue.convert.options import Conversion
from segue.convert.pretrained import Base
from segue.convert.tasks import IGNORED, HiddenToken, Labels, NextToken, Outputs, Task, embedded
from segue.data.augment import normalise
from segue.data.dataset import Dataset
from segue.data.files import optional, unreadable
from segue.data.hub import HubDataset, ImageFolder, offline, prepared
from segue.errors import ConfigError, DataError, nearest
from segue.training.batches import Batches, InOrder

MAX_HELD_OUT = 256  # examples: enough to tell models apart, few enough for frequent evaluations
HIDDEN_FRACTION = 0.15  # of the tokens that a masked language model has to predict
MOST_FILES = 100_000  # below a folder of texts
SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
TEXT = ("text", "sentence", "content")  # usual names of columns, the first that exists is taken
LABEL = ("label", "labels")


@dataclass
class Data:
    """A task with its data in memory."""

    task: Task
    train: Batches
    held_out: Iterable[Any]  # batches, the same every time
    train_size: str  # as text, such as "12 images"
    held_out_size: str


@dataclass
class Texts:
    """Texts, and their labels where they have some."""

    texts: list[str]
    labels: list[int] | None = None

    def __len__(self) -> int:
        return len(self.texts)


def load(base: Base, settings: Conversion) -> Data:
    """Load the data that a model is trained and evaluated on."""
    if base.reads_images:
        return _images(base, settings)
    names = base.class_names
    found = read_texts(settings.data, text=settings.text, label=settings.label, download=settings.download, names=names)
    return _packed(base, found, settings) if base.kind in ("causal", "masked") else _sentences(base, found, settings)


def read_texts(
    data: str,
    *,
    text: str | None = None,
    label: str | None = None,
    download: bool = False,
    names: Mapping[str, int] | None = None,
) -> Texts:
    """Read a file, a folder of files, or a dataset by its id (`id` or `id:configuration`).

    A plain text file is one text. Tables (JSON lines, CSV, TSV, Parquet) have a column of texts, by default the first of
    'text', 'sentence' and 'content' that exists, and optionally one of labels: numbers, or class names that `names` maps.
    """
    fault = f"texts cannot be read from {data!r}."
    path = Path(data).expanduser()
    if path.is_file():
        rows = _of_file(fault, path)
    elif (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        rows = _training_rows(optional("datasets", "hf", fault).load_from_disk(str(path)))
    elif path.is_dir():
        rows = (row for file in _files_in(fault, path) for row in _of_file(fault, file))
    else:
        rows = _of_dataset(fault, data, download)
    return _columns(fault, rows, text, label, names or {})


def _files_in(fault: str, folder: Path) -> list[Path]:
    """Find the files of known types below a folder; a whole disk is not a folder of texts."""
    inside = list(islice(folder.rglob("*"), MOST_FILES + 1))
    if len(inside) > MOST_FILES:
        raise DataError(fault, f"The folder has more than {MOST_FILES:,} files.", "give the folder with the texts alone.")
    files = sorted(file for file in inside if file.suffix.lower() in SUFFIXES)
    if not files:
        raise DataError(fault, "The folder has no file of a known type.", f"known types are {', '.join(SUFFIXES)}.")
    return files


def require_positions(base: Base, tokens: int) -> None:
    """Refuse texts that are longer than the model has positions for."""
    if base.positions is not None and tokens > base.positions:
        fault, found = f"tokens must be at most {base.positions}, got {tokens}.", f"{base.name} has {base.positions} positions."
        raise ConfigError(fault, found, f"give --tokens {base.positions}, or fewer.")


def _packed(base: Base, found: Texts, settings: Conversion) -> Data:
    """Join all texts, an end mark after each, and cut them into pieces of the same length."""
    require_positions(base, settings.tokens)
    end = base.processor.eos_token_id if base.processor.eos_token_id is not None else base.processor.sep_token_id
    stream: list[int] = []
    for ids in base.processor(found.texts, add_special_tokens=False, verbose=False)["input_ids"]:
        stream += ids if end is None else [*ids, end]
    blocks = torch.tensor(stream[: len(stream) // settings.tokens * settings.tokens]).reshape(-1, settings.tokens)
    held = _held(len(blocks), settings, f"pieces of {settings.tokens} tokens")
    train, held_out = blocks[:-held], blocks[-held:]  # the end of the text, so that no piece of it is trained on
    described = f"{train.numel():,} tokens in pieces of {settings.tokens}", f"the last {held_out.numel():,} tokens"
    if base.kind == "causal":
        batches = Batches(len(train), settings.batch, lambda chosen, _: {"input_ids": train[chosen]}, seed=settings.seed)
        evaluated = InOrder(held, settings.batch, lambda chosen: {"input_ids": held_out[chosen]})
        return Data(NextToken(), batches, evaluated, *described)
    mask = base.processor.mask_token_id
    if mask is None:
        raise DataError(f"{base.name} cannot predict hidden tokens.", "Its tokenizer has no mask token.", "use another model.")

    def hidden(ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        order = torch.rand(ids.shape, generator=generator).argsort(dim=1)
        chosen = order < max(1, round(HIDDEN_FRACTION * ids.shape[1]))  # the same number in every text, for equal weights
        return {"input_ids": ids.masked_fill(chosen, mask), "labels": ids.masked_fill(~chosen, IGNORED)}

    def fixed(chosen: Tensor) -> dict[str, Tensor]:
        return hidden(held_out[chosen], torch.Generator().manual_seed(int(chosen[0])))

    batches = Batches(len(train), settings.batch, lambda chosen, noise: hidden(train[chosen], noise), seed=settings.seed)
    return Data(HiddenToken(), batches, InOrder(held, settings.batch, fixed), *described)


def _sentences(base: Base, found: Texts, settings: Conversion) -> Data:
    """Take every text as one example, padded to the longest of its batch."""
    longest = min(settings.tokens, base.positions or settings.tokens, base.processor.model_max_length)
    if len(found) == 1 and found.labels is None:  # a plain text file has one text per line
        found = Texts([line for line in found.texts[0].splitlines() if line.strip()])
    labelled = base.kind == "labels"
    if labelled:
        _require_labels(base, found.labels, settings)
    held = _held(len(found), settings, "texts")

    def encoded(places: Tensor) -> dict[str, Tensor]:
        batch = [found.texts[i] for i in places.tolist()]
        tokens = base.processor(batch, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        answers = {"labels": torch.tensor([found.labels[i] for i in places.tolist()])} if labelled and found.labels else {}
        return {**tokens, **answers}

    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))  # files are often sorted
    train, held_out = order[held:], order[:held]
    batches = Batches(len(train), settings.batch, lambda chosen, _: encoded(train[chosen]), seed=settings.seed)
    described = f"{len(train):,} texts of at most {longest} tokens", f"{held:,} texts"
    return _with_task(base, batches, InOrder(held, settings.batch, lambda chosen: encoded(held_out[chosen])), described)


def _images(base: Base, settings: Conversion) -> Data:
    """Prepare images by the model's own settings; the test part of the data is held out."""
    data = _image_source(base, settings)()
    shape = tuple(base.processor["image_mean"]), tuple(base.processor["image_std"]), int(base.model.config.image_size)  # type: ignore[arg-type, union-attr]
    number = _numbering(base, settings, data.classes)
    if base.kind == "labels":
        _require_labels(base, number.tolist(), settings)

    def batch(part: Any, chosen: Tensor) -> dict[str, Tensor]:
        pixels = {"pixel_values": normalise(part.inputs[chosen], *shape)}
        return {**pixels, "labels": number[part.labels[chosen]]} if base.kind == "labels" else pixels

    held = min(len(data.test), MAX_HELD_OUT)
    held_out = torch.randperm(len(data.test), generator=torch.Generator().manual_seed(0))[:held]  # files are in order of class
    batches = Batches(len(data.train), settings.batch, lambda chosen, _: batch(data.train, chosen), seed=settings.seed)
    described = f"{len(data.train):,} images", f"{held:,} images"
    return _with_task(
        base, batches, InOrder(held, settings.batch, lambda chosen: batch(data.test, held_out[chosen])), described
    )


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


def _with_task(base: Base, train: Batches, held_out: InOrder, described: tuple[str, str]) -> Data:
    if base.kind == "labels":
        return Data(Labels(), train, held_out, *described)
    with torch.no_grad():
        with_targets = [{**batch, "targets": embedded(base.model, batch)} for batch in held_out]
    return Data(Outputs(), train, with_targets, *described)


def _held(count: int, settings: Conversion, what: str) -> int:
    held = min(MAX_HELD_OUT, max(1, round(settings.validation * count)))
    if count - held < 1:
        hint = "give more data, or shorter pieces (--tokens)."
        raise DataError(f"{settings.data} is too small to train on.", f"It makes {count} {what}.", hint)
    return held


def _require_labels(base: Base, labels: list[int] | None, settings: Conversion) -> None:
    classes = int(base.model.config.num_labels)  # type: ignore[arg-type, union-attr]
    fault = f"{settings.data} does not fit {base.name}, which has {classes} classes."
    if labels is None:
        raise DataError(fault, "It has no label column.", "name it with --label.")
    if not 0 <= min(labels) <= max(labels) < classes:
        raise DataError(fault, f"Its labels go from {min(labels)} to {max(labels)}.", "number them as the model does.")


def _of_file(fault: str, path: Path) -> Iterator[dict[str, Any]]:
    try:
        if path.suffix.lower() == ".parquet":
            yield from optional("pyarrow.parquet", "lab", fault).read_table(path).to_pylist()
            return
        content = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".jsonl":
            yield from (json.loads(line) for line in content.split("\n") if line.strip())
        elif path.suffix.lower() == ".json":
            loaded = json.loads(content)
            yield from loaded if isinstance(loaded, list) else [loaded]
        elif path.suffix.lower() == ".csv":
            yield from csv.DictReader(content.splitlines(keepends=True))
        elif path.suffix.lower() == ".tsv":  # quotes mean nothing
            header, *lines = [line.rstrip("\r").split("\t") for line in content.split("\n") if line]
            yield from (dict(zip(header, line, strict=True)) for line in lines)
        else:
            yield {"text": content}
    except (OSError, ValueError) as error:
        raise unreadable(fault, path, error) from error


def _of_dataset(fault: str, data: str, download: bool) -> Iterator[dict[str, Any]]:
    datasets = optional("datasets", "hf", fault)
    name, _, configuration = data.partition(":")
    try:
        with nullcontext() if download else offline():
            parts = prepared(fault, datasets.load_dataset_builder(name, configuration or None))
    except DataError:
        raise
    except Exception as error:  # `datasets` raises errors of many libraries
        hint = "give a file that exists, or allow the download with --download."
        raise DataError(fault, f"It is neither a file nor a downloaded dataset ({type(error).__name__}).", hint) from error
    yield from _training_rows(parts)


def _training_rows(parts: Any) -> Iterator[dict[str, Any]]:
    """Return the training part; held-out examples are taken from its end."""
    if not isinstance(parts, dict):
        return iter(parts)
    return iter(parts["train" if "train" in parts else next(iter(parts))])


def _columns(
    fault: str, rows: Iterator[dict[str, Any]], text: str | None, label: str | None, names: Mapping[str, int]
) -> Texts:
    found: list[str] = []
    labels: list[int] = []
    text_column = label_column = None
    for row in rows:
        if not isinstance(row, dict):
            raise DataError(fault, f"A row is a {type(row).__name__}, not named values.", 'give rows such as {"text": "..."}.')
        if text_column is None:
            text_column = _column(fault, row, text, TEXT)
            wanted = [label] if label else [name for name in LABEL if name in row]
            label_column = _column(fault, row, wanted[0], LABEL) if wanted else None
        content = row.get(text_column)
        if not isinstance(content, str):
            raise DataError(fault, f"In row {len(found) + 1}, {text_column!r} is {content!r}.", "every row needs a text.")
        found.append(content)
        if label_column is not None:
            value = row.get(label_column)
            labels.append(names[str(value)] if str(value) in names else _label(fault, value, len(found)))
    if not found:
        raise DataError(fault, "It has no text.", "give a file that has some.")
    return Texts(found, labels if label_column is not None else None)


def _column(fault: str, row: dict[str, Any], named: str | None, usual: tuple[str, ...]) -> str:
    name = named or next((column for column in usual if column in row), None)
    if name is None or name not in row:
        hint = f"name one with --text or --label. {nearest(str(named), list(row))}"
        raise DataError(fault, f"Its columns are {', '.join(map(repr, row))}.", hint)
    return name


def _label(fault: str, value: Any, row: int) -> int:
    try:
        number = int(value)
        if number == float(value):
            return number
        raise ValueError
    except (TypeError, ValueError):
        hint = "give the indices or names of the model's classes."
        raise DataError(fault, f"In row {row} the label is {value!r}.", hint) from None
