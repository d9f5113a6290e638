"""Images in Parquet files, as the Hugging Face Hub stores them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.data.checks import image_dataset
from segue.data.columns import read_columns
from segue.data.examples import Dataset
from segue.data.extras import optional
from segue.data.files import existing_file, located, stored, unreadable


@dataclass(frozen=True, kw_only=True)
class Parquet:
    """Load two Parquet files, or two patterns such as "train-*.parquet"; the columns often are called img or fine_label."""

    train: str | Path
    test: str | Path
    image: str = "image"
    label: str = "label"

    def __post_init__(self) -> None:
        stored(self, "train", "test")

    def __call__(self) -> Dataset:
        asked = f"{self} was to be loaded."
        train, test = _table(asked, located(self.train), self), _table(asked, located(self.test), self)
        return image_dataset(
            asked,
            read_columns(asked, "training", train, self.image, self.label),
            read_columns(asked, "test", test, self.image, self.label),
            _classes(train, self.label),
        )


def _table(asked: str, path: Path, source: Parquet) -> Any:
    arrow, parquet = optional("pyarrow", "lab", asked), optional("pyarrow.parquet", "lab", asked)
    shards = sorted(path.parent.glob(path.name)) if "*" in path.name else []
    tables = []
    for shard in shards or [existing_file(asked, path)]:
        try:
            # one file, not a dataset of many: no column is invented from the names of its folders
            with parquet.ParquetFile(shard) as file:
                columns = [name for name in file.schema_arrow.names if name in (source.image, source.label)]
                tables.append(file.read(columns=columns) if len(columns) == 2 else file.schema_arrow.empty_table())
        except Exception as error:  # Arrow's errors, and whatever a damaged footer makes of them
            raise unreadable(asked, shard, error) from error
    try:
        return arrow.concat_tables(tables)
    except arrow.ArrowInvalid as error:
        raise unreadable(asked, path, error) from error


def _classes(table: Any, label: str) -> int | None:
    """Return the number of classes that `datasets` wrote into the file, if it did."""
    try:
        features = json.loads((table.schema.metadata or {})[b"huggingface"])["info"]["features"]
        return len(features[label]["names"]) or None
    except (KeyError, TypeError, ValueError):
        return None
