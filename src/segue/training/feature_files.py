"""Features on disk: what every site was called with and returned, for a fit without any forward of the model.

cache/features.json                  written last: hashes of the model, of each batch and of each file, and how calls were made
cache/<site>/<batch>.safetensors     the tensors of one batch at one site
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from segue.checkpoint.folders import hash_file
from segue.checkpoint.packing import TensorBag
from segue.core import files, tensor_files
from segue.core.blending import call_arguments, calling, first_floating, tensors
from segue.core.handover import Handover
from segue.core.local_fit import Call, Features
from segue.errors import DataError, PlanError

FORMAT = 1
INDEX = "features.json"


@dataclass(frozen=True)
class Recorded:
    """The features of one batch at one site."""

    calls: list[Call]
    axes: list[int | None]  # of the features in the output of each call
    mask: Tensor | None


@dataclass(frozen=True)
class FeatureFiles:
    """The features of all batches at all sites, in a folder."""

    folder: Path
    index: dict[str, Any]

    @property
    def key(self) -> str:
        """The hash of everything that the features are."""
        return hashlib.sha256(json.dumps(self.index, sort_keys=True).encode()).hexdigest()

    @property
    def batches(self) -> int:
        return len(self.index["batches"])

    def read(self, place: int, batch: int, *, verify: bool) -> Recorded:
        """Read what a site saw of a batch; its tensors stay in the file until they are used."""
        entry, path = self.index["sites"][place]["files"][batch], self._path(place, batch)
        try:
            if verify and hash_file(path) != entry["hash"]:
                raise OSError("it does not match its hash")
            bag = TensorBag(tensor_files.read(path))
            args, kwargs, outputs, mask = bag.unpack(entry["calls"], "calls")
        except Exception as error:
            raise DataError(
                f"the features in {path} cannot be read.",
                f"{type(error).__name__}: {error}.",
                f"delete {self.folder / INDEX}, so that they are recorded again.",
            ) from error
        made = zip(args, kwargs, outputs, entry["rows"], strict=True)
        return Recorded([Call(a, k, rows, False, output=y) for a, k, y, rows in made], entry["axes"], mask)

    def _path(self, place: int, batch: int) -> Path:
        return self.folder / str(place) / f"{batch}.safetensors"


def recorded(
    handover: Handover, batches: Iterable[Any], folder: Path, split: int, mask: Callable[[Any], Tensor | None]
) -> FeatureFiles:
    """Return the features of batches, from the folder if they are there; those of another model or batches are refused."""
    found = _index_in(folder)
    index: dict[str, Any] = {"format": FORMAT, "model": _hash_of(handover), "batches": []}
    proved = found is not None and split in (1, found.get("split"))  # that the teachers can be called with parts of a batch
    sites: list[dict[str, Any]] = [{"name": name, "files": []} for name in handover.seams]
    with files.writing(folder):
        for number, batch in enumerate(batches):
            padding = mask(batch)
            index["batches"].append(tensor_files.fingerprint({str(i): x for i, x in enumerate(tensors((batch, padding)))}))
            if found is not None and (proved or number):
                continue
            features = _features(handover, batch, padding)
            if number == 0:  # students and cuts are checked here, where the teachers are
                with torch.no_grad():
                    features.loss(0, split, measured=False)
            if found is not None:
                continue
            for place, site in enumerate(sites):
                site["files"].append(_write(features, site["name"], folder / str(place) / f"{number}.safetensors"))
        if not index["batches"]:
            raise DataError("there are no batches.", "The iterable yields nothing.", "give one that yields at least one batch.")
        if found is not None:
            _require_same(found, {**index, "sites": list(handover.seams)}, folder)
            return FeatureFiles(folder, found)
        text = json.dumps({**index, "sites": sites, "split": split})
        (folder / f".{INDEX}").write_text(text, encoding="utf-8")
        os.replace(folder / f".{INDEX}", folder / INDEX)
    return FeatureFiles(folder, json.loads(text))


def _require_same(found: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    known = {**found, "sites": [site["name"] for site in found["sites"]]}
    if different := [name for name in now if known.get(name) != now[name]]:
        raise DataError(
            f"{folder} holds other features.",
            f"They differ in: {', '.join(different)}.",
            "give the same batches in the same order, another folder, or delete this one. Nothing was changed.",
        )


def _features(handover: Handover, batch: Any, mask: Any) -> Features:
    if not isinstance(mask, Tensor | None):
        raise PlanError(
            f"fit_locally(mask=...) must return a tensor or None, got {type(mask).__name__}.",
            "It is called with each batch.",
            "return 1 where a token counts and 0 where it is padding.",
        )
    args, kwargs = call_arguments(batch)
    with handover.features(mask) as features, calling("batch"):
        handover.model(*args, **kwargs)
    return features


def _write(features: Features, name: str, path: Path) -> dict[str, Any]:
    """Write the tensors of one site, and return how they were used."""
    handover, site = features.handover, features.handover.seams[name].site
    calls = features.calls.get(name, [])
    outputs = [first_floating(call.output, site) for call in calls]
    bag = TensorBag({})
    packed = bag.pack(([call.args for call in calls], [call.kwargs for call in calls], outputs, features.mask), "calls")
    path.parent.mkdir(parents=True, exist_ok=True)
    tensor_files.write(path, {name: x.detach().cpu().contiguous() for name, x in bag.tensors.items()})
    return {
        "hash": hash_file(path),
        "calls": packed,
        "rows": [call.rows for call in calls],
        "axes": [handover.auxiliary.axis_of(handover.model, name, output) for output in outputs],
    }


def _hash_of(handover: Handover) -> str:
    """Hash what makes the features: teachers, and what is around them, as it is now."""
    around = {**handover.original_backbone(), **handover.backbone_that_changes()}
    known = [tensor_files.fingerprint(around), handover.teacher_hashes]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _index_in(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(files.content(folder / INDEX))
        _ = found["sites"], found["batches"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"the features in {folder} cannot be read.",
            f"{INDEX}: {type(error).__name__}: {error}.",
            "delete it, so that they are recorded again, or give another folder.",
        ) from error
    return dict(found)
