"""Columns of an Arrow table: what Parquet files and Hugging Face datasets are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from segue.data.examples import Examples
from segue.data.extras import optional
from segue.data.files import contents
from segue.data.pictures import decode, stack
from segue.data.pixels import as_images, as_labels
from segue.errors import DataError, nearest


def read_columns(asked: str, part: str, table: Any, image: str, label: str, follow: bool = False) -> Examples:
    """Read the columns `image` and `label` of a pyarrow.Table; `follow` paths where it has no images inside."""
    types = optional("pyarrow.types", "lab", asked)
    for column in (image, label):
        if column not in table.column_names:
            hint = f"Name the columns with image=... and label=... {nearest(column, table.column_names)}"
            raise DataError(asked, f"The {part} part has no column {column!r}.", hint)
        if table.column(column).null_count:
            found = f"The column {column!r} of the {part} part has {table.column(column).null_count} empty places."
            raise DataError(asked, found, "Remove those rows, or take a part whose labels are public.")
    labels = table.column(label)
    if not types.is_integer(labels.type):
        hint = "Labels must be whole numbers that count from 0."
        raise DataError(asked, f"The column {label!r} of the {part} part holds {labels.type}.", hint)
    return Examples(_images(asked, part, table.column(image), image, follow), as_labels(asked, part, labels.to_numpy()))


def _images(asked: str, part: str, column: Any, name: str, follow: bool) -> Tensor:
    types = optional("pyarrow.types", "lab", asked)
    chunks = [chunk.storage if hasattr(chunk, "storage") else chunk for chunk in column.chunks]  # an extension type's arrays
    if not chunks:
        return stack(asked, part, [])
    kind = chunks[0].type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _nested(asked, part, optional("pyarrow", "lab", asked).concat_arrays(chunks))
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        encoded = [_content(asked, part, row.as_py(), follow) for chunk in chunks for row in chunk]
    elif types.is_binary(kind) or types.is_large_binary(kind):
        encoded = [row.as_py() for chunk in chunks for row in chunk]
    else:
        raise DataError(
            asked,
            f"The column {name!r} of the {part} part holds {kind}.",
            "An image column holds encoded images (bytes, or a struct with bytes) or nested lists of pixels.",
        )
    return stack(asked, part, [decode(asked, f"{part} image {at}", content) for at, content in enumerate(encoded)])


def _content(asked: str, part: str, row: dict[str, Any], follow: bool) -> bytes:
    if row["bytes"] is not None:
        return bytes(row["bytes"])
    path = Path(row.get("path") or "")
    if follow and path.is_absolute():
        return contents(asked, path)
    raise DataError(
        asked,
        f"An image of the {part} part has no bytes, only the path {row.get('path')!r}.",
        "Take a copy that has the images inside, or load the files with ImageFolder.",
    )


def _nested(asked: str, part: str, lists: Any) -> Tensor:
    """Unpack lists of lists level by level, without turning every pixel into a Python number."""
    types, compute = optional("pyarrow.types", "lab", asked), optional("pyarrow.compute", "lab", asked)
    shape = [len(lists)]
    while types.is_list(lists.type) or types.is_large_list(lists.type) or types.is_fixed_size_list(lists.type):
        lengths = compute.unique(compute.list_value_length(lists)).to_pylist()
        if len(lengths) != 1 or lengths[0] is None:
            raise DataError(
                asked,
                f"The {part} images are lists of different lengths: {', '.join(map(str, lengths[:4]))}.",
                "All images must have one size.",
            )
        shape.append(lengths[0])
        lists = lists.flatten()
    if lists.null_count or not (types.is_integer(lists.type) or types.is_floating(lists.type)):
        found = f"The {part} images are lists of {lists.type} with {lists.null_count} empty places."
        raise DataError(asked, found, "Every pixel must be a number.")
    return as_images(asked, part, lists.to_numpy(zero_copy_only=False).reshape(shape))
