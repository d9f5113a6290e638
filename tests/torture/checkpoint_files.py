"""Damaged and forged checkpoints: refused in three lines with everything as before, or read with the identical result."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import segue
from segue.checkpoint import folders
from segue.errors import SegueError, SegueWarning
from segue.training.tasks import Classification
from tests.helpers.tiny import SITES, Net, optimizer_for, start, train
from tests.torture.campaign import ACCEPTED, CHANGED, FOREIGN, HUNG, SILENT, Attempt, Bench, Outcome, is_three_lines, one_line
from tests.torture.mutations import OUTSIDE, damage, forge, forge_tensors
from tests.torture.watch import HungError, watched, within
from tests.torture.wrong_calls import fingerprint
from tests.training import fit_cases
from tests.training.fit_cases import CASES, Stop

SECONDS = 30  # after which a call counts as hung
IMPORTANT = [["segue", "step"], ["segue", "total_steps"], ["kind"], ["format"], ["aliases"], ["random"], ["segue"]]
STEP = 6  # of the training that is resumed


def digest(*parts: Any) -> str:
    """Hash numbers, texts and tensors, in any nesting."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            found.update(f"{part.dtype} {tuple(part.shape)}".encode())
            found.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for name, value in sorted(part.items(), key=lambda item: str(item[0])):
                add(str(name))
                add(value)
        elif isinstance(part, list | tuple):
            for value in part:
                add(value)
        else:
            found.update(repr(part).encode())

    add(parts)
    return found.hexdigest()


@dataclass(frozen=True)
class Loader:
    """How a checkpoint is read: into what, and what of it must be identical afterwards, or unchanged."""

    name: str
    source: Callable[[Path], None]  # write the checkpoint
    target: Callable[[], Any]
    load: Callable[[Any, Path], str]  # (target, folder) -> digest of the result
    state: Callable[[Any], str]  # of a target


def write_handover(folder: Path) -> None:
    handover = start(segue.Plan(sites=SITES, guidance=segue.losses.FeatureGuidance(), gate=segue.gates.GumbelSoftmax()))
    optimizer = optimizer_for(handover)
    for steps in (2, 1):  # two checkpoints
        train(handover, optimizer, steps)
        segue.save(handover, folder, optimizer=optimizer)


def write_model(folder: Path) -> None:
    handover = start(segue.Plan(sites=SITES, schedule=segue.schedules.Constant(alpha=0.0)))
    segue.save(handover.finalize_(), folder)


def write_training(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        torch.manual_seed(0)
        try:
            fit_cases.train(name, folder, loss=Stop("error", STEP + 1, CASES[name]["recipe"].accumulate))
        except RuntimeError:
            return

    return write


def handover_state(handover: segue.Handover) -> str:
    return digest(fingerprint(handover), repr(handover.plan), torch.get_rng_state())


def load_plain(model: Net, folder: Path) -> str:
    return handover_state(segue.load_(model, folder))


def load_model(model: Net, folder: Path) -> str:
    return fingerprint(segue.load_(model, folder))


def load_running(target: Any, folder: Path) -> str:
    handover, optimizer = target
    segue.load_(handover, folder, optimizer=optimizer)
    return running_state(target)


def running_target() -> Any:
    handover = start(segue.Plan(sites=SITES, guidance=segue.losses.FeatureGuidance(), gate=segue.gates.GumbelSoftmax()))
    optimizer = optimizer_for(handover)
    train(handover, optimizer, 1)
    return handover, optimizer


def running_state(target: Any) -> str:
    return digest(handover_state(target[0]), target[1].state_dict())


def resume_fit(name: str) -> Callable[[Net, Path], str]:
    def resume(model: Net, folder: Path) -> str:
        case = CASES[name]
        loss, settings = Classification(label_smoothing=0.1), {"evaluations": (2, 5, 6), "checkpoint_every": 3}
        segue.fit(
            model,
            case["plan"],
            case["batches"](),
            loss,
            recipe=case["recipe"],
            validation=fit_cases.VALIDATION,
            folder=folder,
            resume=True,
            progress=None,
            **settings,
        )
        (folder / "model.txt").write_text("")
        return digest(fingerprint(model), *fit_cases.left_behind(folder))

    return resume


def model_state(model: Net) -> str:
    return digest(fingerprint(model), torch.get_rng_state())


LOADERS = [
    Loader("a handover into a plain model", write_handover, lambda: Net().train(), load_plain, model_state),
    Loader("a handover into a running one", write_handover, running_target, load_running, running_state),
    Loader("a finalized model", write_model, lambda: Net().train(), load_model, model_state),
    Loader("fit, resumed", write_training("dcr_dfg"), lambda: Net(dropout=0.2), resume_fit("dcr_dfg"), fingerprint),
    Loader(
        "fit without a plan",
        write_training("a plain model"),
        lambda: Net(dropout=0.2),
        resume_fit("a plain model"),
        fingerprint,
    ),
]


def newest(folder: Path) -> Path:
    return folders.checkpoints(folder)[0]


def seal(checkpoint: Path, listed: dict[str, Any] | None = None) -> None:
    """Write a manifest for what is there, and name the folder and `latest` by it, as one does who wants it accepted."""
    files = {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in folders.FILES}
    content = json.dumps({"format": folders.FORMAT, "files": files} if listed is None else listed).encode()
    (checkpoint / "manifest.json").write_bytes(content)
    name = f"{checkpoint.name.partition('-')[0]}-{hashlib.sha256(content).hexdigest()[:16]}"
    checkpoint.rename(checkpoint.with_name(name))
    (checkpoint.parent / "latest").write_text(name)


def spoil(chance: random.Random, folder: Path) -> str:
    """Damage or forge the newest checkpoint of a folder, and say how."""
    place = newest(folder)
    kind = chance.choice(["damage", "damage", "state", "state", "state", "tensors", "manifest", "latest"])
    if kind == "damage":
        names = ["latest", *(f"{place.name}/{name}" for name in ("manifest.json", *folders.FILES))]
        return damage(chance, folder, names).replace(place.name, "newest")
    if kind == "latest":
        outside = folder.parent / "outside"
        shutil.copytree(place, outside / place.name)
        text = chance.choice(
            [f"../outside/{place.name}", str(outside / place.name), OUTSIDE, "..", ".", "", "latest", "x" * 5000, "\x00", "\n"]
        )
        (folder / "latest").write_text(text)
        return f"latest = {text.replace(str(folder.parent), '')[:40]!r}"
    if kind == "manifest":
        files = json.loads((place / "manifest.json").read_text())
        text, how = forge(chance, files, [["files"], ["files", "state.json"], ["format"]])
        if "lists" in text or "[[[" in text:
            (place / "manifest.json").write_text(text)
        else:
            seal(place, json.loads(text))
        return f"manifest forged: {how}"
    if kind == "state":
        text, how = forge(chance, json.loads((place / "state.json").read_text()), IMPORTANT)
        (place / "state.json").write_text(text)
    else:
        content, how = forge_tensors(chance, (place / "tensors.safetensors").read_bytes())
        (place / "tensors.safetensors").write_bytes(content)
    seal(place)
    return f"{kind} forged: {how}"


def attempt(loader: Loader, bench: Bench, place: Path, chance: random.Random) -> Outcome:
    """Spoil a copy of a checkpoint, read it, and judge."""
    source, expected, earlier = original(loader, bench)
    folder = place / "run"
    shutil.copytree(source, folder, symlinks=True)
    checkpoints = folder / "checkpoints" if (folder / "checkpoints").exists() else folder
    case = f"{loader.name}: {spoil(chance, checkpoints)}"
    target = loader.target()
    before = loader.state(target)
    found, error = "", None
    with watched(place) as seen:
        try:
            with within(SECONDS), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = loader.load(target, folder)
        except HungError:
            return Outcome(case, HUNG, f"more than {SECONDS} s")
        except Exception as caught:
            error = caught
    if seen or (checkpoints / "executed").exists():
        return Outcome(case, ACCEPTED, f"it reached {seen[:3]}")
    if error is None:
        told = any(issubclass(warning.category, SegueWarning) for warning in said)  # that an earlier one is taken
        right = found == expected or (told and found == earlier)
        return Outcome(case) if right else Outcome(case, ACCEPTED, "it is read, with another result")
    if loader.state(target) != before:
        return Outcome(case, CHANGED, one_line(error))
    if not isinstance(error, SegueError):
        return Outcome(case, FOREIGN, one_line(error))
    return Outcome(case) if is_three_lines(error) else Outcome(case, SILENT, f"not three lines: {str(error)[:200]!r}")


def original(loader: Loader, bench: Bench) -> tuple[Path, str, str]:
    """Return an undamaged checkpoint, and what reading it and the one before it gives, made once."""
    source, results = bench.kept / loader.name, bench.kept / f"{loader.name}.results"
    if not results.exists():
        torch.manual_seed(0)
        loader.source(source)
        found = []
        for damaged in (False, True):
            copy = bench.kept / "copy"
            shutil.copytree(source, copy)
            place = copy / "checkpoints" if (copy / "checkpoints").exists() else copy
            if damaged and len(folders.checkpoints(place)) > 1:
                shutil.rmtree(newest(place))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(loader.load(loader.target(), copy))
            shutil.rmtree(copy)
        results.write_text(json.dumps(found))
    return source, *json.loads(results.read_text())


def attempts(bench: Bench) -> Iterator[Attempt]:
    for chance in bench.chances():
        loader = chance.choice(LOADERS)
        yield Attempt(loader.name, lambda place, a=loader, c=chance: attempt(a, bench, place, c))
