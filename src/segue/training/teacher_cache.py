"""The offline teacher: the original's most probable classes of every token, computed once and kept on disk.

cache/teacher.json           written first: hashes of the original and of the data, k and the temperature
cache/<rank>-<n>.safetensors keys (examples, 4), lengths (examples,), classes (tokens, k), logs (tokens, k + 1)

An example is known by the hash of what the model is called with for it, padding left out: order, batch size and processes may
change. A token takes 6 k + 2 bytes: four for each class, two for each logarithm and for that of the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segue.border import PositiveInt, checked
from segue.core import files, tensor_files
from segue.core.auxiliary import logits_of
from segue.core.backbone import evaluating
from segue.core.blending import padding_mask
from segue.errors import DataError, PlanError
from segue.losses import LogitDistillation, OnTeacherStream, TopProbabilities
from segue.plan import Plan
from segue.training.batches import mapped
from segue.training.distributed import Processes
from segue.training.progress import Progress
from segue.training.tasks import LossFn

FORMAT = 1
INDEX = "teacher.json"
CLASSES = 64  # k
LOWEST = -65504.0  # the logarithm of no mass, in float16
TOKENS_IN_FILE = 1 << 16
KEY = 4  # numbers of 64 bits


@dataclass(frozen=True)
class Place:
    """Where the tokens of an example are."""

    file: Path
    first: int
    count: int


@dataclass(frozen=True)
class TeacherCache:
    """What the original returned for every example of the data, for `fit(teacher_cache=...)`."""

    folder: Path
    index: dict[str, Any]
    places: dict[bytes, Place]

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return sum(place.count for place in self.places.values())

    @property
    def bytes(self) -> int:
        """The size on disk."""
        return sum(file.stat().st_size for file in {place.file for place in self.places.values()})

    def require(self, model: nn.Module, plan: Plan | None) -> None:
        """Refuse another original, and a plan whose losses need more than the cache has."""
        fault = f"the teacher cache in {self.folder} does not fit."
        distill = distillation_of(plan, fault)
        if distill.temperature != self.index["temperature"]:
            found = f"Its temperature is {self.index['temperature']}, that of the plan's distillation {distill.temperature}."
            raise PlanError(fault, found, "give both the same temperature.")
        if (now := tensor_files.fingerprint(model.state_dict())) != self.index["teacher"]:
            found = f"It is of another original: sha256 {self.index['teacher'][:16]}…, not {now[:16]}…"
            raise DataError(fault, found, "give the original that it was made of, or make another cache.")

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], logits: Tensor) -> TopProbabilities:
        """Return what the original returned for a call of the model; `logits` are the student's, for their shape."""
        keys, real = _examples(args, kwargs, logits)
        k = min(self.index["k"], logits.shape[-1])
        classes = torch.zeros(*real.shape, k, dtype=torch.long)
        logs = torch.full((*real.shape, k + 1), LOWEST)
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for row, key in enumerate(keys):
                if (place := self.places.get(key)) is None:
                    raise _unknown(self.folder, row)
                if place.file not in opened:
                    opened[place.file] = stack.enter_context(_opened(place.file))
                part, tokens = slice(place.first, place.first + place.count), int(real[row].sum())
                of_classes, of_logs = (opened[place.file].get_slice(name)[part] for name in ("classes", "logs"))
                if (of_classes.shape, of_logs.shape) != ((tokens, k), (tokens, k + 1)):
                    shapes = f"{tuple(of_classes.shape)} and {tuple(of_logs.shape)}"
                    raise _damaged(place.file, ValueError(f"classes and logs of {tokens} tokens have the shapes {shapes}"))
                if not (((of_classes >= 0) & (of_classes < logits.shape[-1])).all() and of_logs.isfinite().all()):
                    raise _damaged(place.file, ValueError("a class is not one of the model's, or a logarithm not finite"))
                classes[row, real[row]] = of_classes.long()
                logs[row, real[row]] = of_logs.float().log_softmax(-1)  # rounded: sum to 1
        shape = logits.shape[:-1]
        return TopProbabilities(classes.reshape(*shape, k).to(logits.device), logs.reshape(*shape, k + 1).to(logits.device))


def distillation_of(plan: Plan | None, fault: str) -> LogitDistillation:
    """Return the distillation of a plan, and refuse one whose losses need more of the original than a cache has."""
    distill = None if plan is None else plan.distill
    if not isinstance(distill, LogitDistillation):
        found = f"The plan's distillation is {None if distill is None else type(distill).__name__}."
        raise PlanError(fault, found, "give a plan with distill=LogitDistillation(...), or leave the cache out.")
    if plan is not None and isinstance(plan.guidance, OnTeacherStream):
        found = "OnTeacherStream compares outputs inside of the original, which is run for it in every step."
        raise PlanError(fault, found, "leave OnTeacherStream out, or the cache.")
    return distill


@checked
def cache_teacher(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn,
    *,
    folder: str | os.PathLike[str],
    k: PositiveInt = CLASSES,
    distill: LogitDistillation | None = None,
    progress: str | None = "caching the teacher",
) -> TeacherCache:
    """Run the original once over all examples and keep its `k` most probable classes of each token, and the mass of the rest.

    A cache that is there is used, an unfinished one resumes; one of another model, of other data or other settings is refused.
    In several processes each computes its part.

    >>> import torch
    >>> import segue
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    >>> batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(2)]
    >>> from tempfile import TemporaryDirectory
    >>> plan, loss_fn, recipe = segue.methods.distillation("0"), segue.Classification(), segue.Recipe(steps=2)
    >>> with TemporaryDirectory() as folder:
    ...     cache = segue.cache_teacher(model, batches, loss_fn, folder=folder, k=1, progress=None)
    ...     done = segue.fit(model, plan, batches, loss_fn, recipe=recipe, teacher_cache=cache, progress=None)

    Args:
        model: The original, before any replacement.
        batches: Every example that the training will read, in any order and any batches; it is read twice.
        loss_fn: That of `fit`: what it calls the model with is what the training looks up.
        folder: Where the cache is written.
        k: Classes that are kept of each token.
        distill: The loss that will use the cache; its temperature is that of the kept probabilities.
        progress: The name of the progress bar; None shows none.
    """
    place, distill = Path(folder), distill or LogitDistillation()
    device = next(iter(model.state_dict().values())).device
    reader = _Reader(model, loss_fn, Processes.current(device))
    keys = [reader.keys(batch) for batch in batches]
    known = {key for each in keys for key in each}
    index = {
        "format": FORMAT,
        "teacher": tensor_files.fingerprint(model.state_dict()),
        "data": hashlib.sha256(b"".join(sorted(known))).hexdigest(),
        "k": k,
        "temperature": distill.temperature,
    }
    _require_same(place, index)
    with files.writing(place):
        place.mkdir(parents=True, exist_ok=True)
        draft = place / f".{INDEX}-{reader.processes.rank}"
        draft.write_text(json.dumps(index), encoding="utf-8")
        os.replace(draft, place / INDEX)
        _compute(place, reader, batches, known, k, distill, Progress(progress, len(keys)))
    reader.processes.wait()
    return TeacherCache(place, index, _places(place))


def _compute(
    place: Path, reader: _Reader, batches: Iterable[Any], known: set[bytes], k: int, distill: LogitDistillation, show: Progress
) -> None:
    """Write what is not there yet, some batches in a file."""
    there = set(_places(place))
    rank, world = reader.processes.rank, reader.processes.world
    waiting: dict[str, list[Tensor]] = {"keys": [], "lengths": [], "classes": [], "logs": []}

    def write() -> None:
        if waiting["keys"]:
            number = len(list(place.glob(f"{rank}-*.safetensors")))
            path = place / f"{rank}-{number}.safetensors"
            tensor_files.write(path.with_suffix(".draft"), {name: torch.cat(x).contiguous() for name, x in waiting.items()})
            os.replace(path.with_suffix(".draft"), path)
            for x in waiting.values():
                x.clear()

    try:
        for number, batch in enumerate(batches):
            if number % world == rank and (found := reader.logits(batch, there, distill)) is not None:
                keys, real, logits = found
                if unknown := [row for row, key in enumerate(keys) if key not in known]:
                    raise _unknown(place, unknown[0])
                top = top_probabilities(logits / distill.temperature, k)
                new = [row for row, key in enumerate(keys) if key not in there and key not in keys[:row]]
                there.update(keys)
                waiting["keys"].append(
                    torch.frombuffer(bytearray(b"".join(keys[row] for row in new)), dtype=torch.int64).view(-1, KEY)
                )
                waiting["lengths"].append(real[new].sum(1))
                waiting["classes"].append(top.classes.view(*real.shape, -1)[new][real[new]].int().cpu())
                waiting["logs"].append(top.logs.view(*real.shape, -1)[new][real[new]].clamp_min(LOWEST).half().cpu())
                if sum(map(len, waiting["classes"])) >= TOKENS_IN_FILE:
                    write()
            show(number + 1)
    finally:
        write()


def top_probabilities(logits: Tensor, k: int) -> TopProbabilities:
    """Return the k most probable classes of logits, with the mass of the rest."""
    logs = logits.float().log_softmax(-1)
    classes = logs.topk(min(k, logs.shape[-1]), -1).indices
    found = TopProbabilities(classes, logs)
    coarse = found.coarse(logs)
    if classes.shape == logs.shape:
        coarse[..., -1] = LOWEST
    return TopProbabilities(classes, coarse)


class _CaughtError(Exception):
    """The model is called, and what with is known."""


@dataclass
class _Call:
    keys: list[bytes]  # of its examples
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None  # None where the model was not run


class _Reader:
    """Call a loss function for what it calls the model with, and for what the original returns."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, processes: Processes) -> None:
        self.model, self.loss_fn, self.processes = model, loss_fn, processes

    def keys(self, batch: Any) -> list[bytes]:
        """Return the key of every example of a batch; the model is not run."""
        return self._call(batch, lambda _: False).keys

    def logits(self, batch: Any, there: set[bytes], distill: LogitDistillation) -> tuple[list[bytes], Tensor, Tensor] | None:
        """Return keys, which tokens are no padding, and what the original returns; None where all examples are there."""
        call = self._call(batch, lambda keys: not there.issuperset(keys))
        if call.output is None:
            return None
        logits = logits_of(distill, call.output)
        return call.keys, _examples(call.args, call.kwargs, logits)[1], logits

    @torch.no_grad()
    def _call(self, batch: Any, runs: Callable[[list[bytes]], bool]) -> _Call:
        calls: list[_Call] = []

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keys = _examples(args, kwargs, None)[0]
            calls.append(_Call(keys, args, kwargs))
            if not runs(keys):
                raise _CaughtError

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls[-1].output = output

        hooks = [
            self.model.register_forward_pre_hook(before, with_kwargs=True),
            self.model.register_forward_hook(after, with_kwargs=True),
        ]
        try:
            with evaluating(self.model):
                self.loss_fn(self.model, mapped(lambda x: x.to(self.processes.device), batch))
        except _CaughtError:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        if len(calls) != 1:
            raise DataError(
                "the teacher cannot be cached for this loss.",
                f"loss_fn calls the model {len(calls)} times for a batch.",
                "leave the cache out, or give a loss_fn that calls the model once.",
            )
        return calls[0]


def _examples(args: tuple[Any, ...], kwargs: dict[str, Any], logits: Tensor | None) -> tuple[list[bytes], Tensor]:
    """Return the key of every example of a call, and which tokens of the logits are no padding, (examples, tokens)."""
    named = {**{str(place): x for place, x in enumerate(args)}, **kwargs}
    given = {name: x.detach().cpu() for name, x in sorted(named.items()) if isinstance(x, Tensor)}
    mask = padding_mask(given)
    given = {name: x for name, x in given.items() if mask is None or name != "attention_mask"}
    if not given:
        found = "It is called without a tensor." if mask is None else "It is called with nothing but an attention_mask."
        raise DataError("examples cannot be told apart by a call of the model.", found, "leave the teacher cache out.")
    rows = len(next(x for x in given.values() if x.dim())) if logits is None else len(logits)
    keys = []
    for row in range(rows):
        digest = hashlib.sha256()
        for name, x in given.items():
            own = x[row] if x.dim() and len(x) == rows else x
            if mask is not None and x.shape[:2] == mask.shape:
                own = own[mask[row] > 0]
            digest.update(f"{name} {own.dtype} {tuple(own.shape)}".encode())
            digest.update(tensor_files.memory(own.contiguous()))
        keys.append(digest.digest())
    if mask is not None and (logits is None or logits.shape[:2] == mask.shape):
        return keys, mask > 0
    tokens = 1 if logits is None else logits[0, ..., 0].numel()
    return keys, torch.ones(rows, tokens, dtype=torch.bool)


def _unknown(folder: Path, row: int) -> DataError:
    return DataError(
        f"the teacher cache in {folder} does not have example {row} of a batch.",
        "The data is not that of the cache, or changes from one reading to the next, as augmented images and hidden tokens do.",
        "make the cache of all examples that the training reads, unchanged, or leave it out.",
    )


def _require_same(folder: Path, index: dict[str, Any]) -> None:
    try:
        found = json.loads(files.content(folder / INDEX))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise _damaged(folder / INDEX, error) from error
    names = {"teacher": "the original", "data": "the data", "k": "k", "temperature": "the temperature", "format": "the format"}
    before = found if isinstance(found, dict) else {}
    if different := [name for name in names if before.get(name) != index[name]]:
        shown = "; ".join(f"{names[name]} ({before.get(name)!s:.16} -> {index[name]!s:.16})" for name in different)
        raise DataError(
            f"{folder} holds another teacher cache.",
            f"It differs in {shown}.",
            "give another folder, or delete this one. Nothing was changed.",
        )


def _places(folder: Path) -> dict[bytes, Place]:
    """Find the tokens of every example that is on disk."""
    places = {}
    for path in sorted(folder.glob("*-*.safetensors")):
        with _opened(path) as file:
            keys, lengths = file.get_tensor("keys"), file.get_tensor("lengths")
        if (
            keys.dtype != torch.int64
            or lengths.dtype != torch.int64
            or keys.shape != (len(lengths), KEY)
            or (lengths < 1).any()
        ):
            found = f"keys {keys.dtype} {tuple(keys.shape)}, lengths {lengths.dtype} {tuple(lengths.shape)}"
            raise _damaged(path, ValueError(found))
        first = 0
        for key, count in zip(keys, lengths.tolist(), strict=True):
            places[bytes(tensor_files.memory(key.contiguous()))] = Place(path, first, count)
            first += count
    return places


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file whose tensors stay on disk until they are asked for."""
    from safetensors import SafetensorError, safe_open  # imported late: `import segue` stays quick

    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DataError:
    hint = "delete that file, so that its part is computed again."
    return DataError(f"the teacher cache cannot be read from {path}.", f"{type(error).__name__}: {error}.", hint)
