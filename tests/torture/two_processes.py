"""Two processes: two that want one folder, and two that train together, of which one is killed."""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from tests.torture import kills, traps
from tests.torture.campaign import FOREIGN, HUNG, LOST, SILENT, Attempt, Bench, Outcome, one_line
from tests.torture.kills import Work, last_line, undisturbed
from tests.torture.traps import Trap
from tests.training import fit_cases

WORLD = 2
LIMIT = 120.0
TOGETHER = ("dcr_dfg", "theseus", "everything trains", "a plain model", "accumulated")


def train_together(folder: Path, name: str, rank: int, store: str) -> None:
    """Train a case as one of two processes, launched as torchrun does it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ |= dict(zip(names, map(str, (rank, rank, WORLD, WORLD)), strict=True))
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timeout)
    fit_cases.train(name, folder)
    dist.barrier()
    dist.destroy_process_group()


def run_together(folder: Path, name: str, log: Path, victim: int = 0, trap: Trap | None = None) -> list[tuple[int | None, str]]:
    """Start both processes, set a trap in one, and return how each ended."""
    store = log.with_name(f"{log.name}.store")
    store.unlink(missing_ok=True)
    own = [trap if rank == victim else None for rank in range(WORLD)]
    begun = [
        traps.begin(train_together, folder, name, rank, str(store), trap=own[rank], log=log.with_name(f"{log.name}{rank}"))
        for rank in range(WORLD)
    ]
    codes = {rank: traps.finish(begun[rank], own[rank], LIMIT) for rank in (victim, 1 - victim)}
    return [(codes[rank], begun[rank].error) for rank in range(WORLD)]


def kill_one(name: str, bench: Bench, place: Path, chance: random.Random) -> Outcome:
    """Kill one of two processes that train together; the other ends, and both together resume bit for bit."""
    reference = bench.kept / f"together {name}"
    if not reference.with_name(f"{reference.name}.facts").exists():
        ended = run_together(reference, name, bench.kept / "log")
        assert [code for code, _ in ended] == [0, 0], ended
    trap, victim = traps.facts(reference).trap(chance, ("SIGKILL", "SIGKILL", "SIGTERM", "operation")), chance.randrange(WORLD)
    case = f"fit {name} in two processes, {trap} in process {victim}"
    ended = run_together(place / "run", name, place / "log", victim, trap)
    for rank, (code, error) in enumerate(ended):
        if code is None:
            return Outcome(case, HUNG, f"process {rank} does not end")
        if code not in (0, -9, -15, 143) and not error:
            return Outcome(case, SILENT, f"process {rank} ended with {code}")
    ended = run_together(place / "run", name, place / "log")
    if [code for code, _ in ended] != [0, 0]:
        return Outcome(case, LOST, "they do not resume: " + "; ".join(last_line(error) for _, error in ended if error))
    try:
        fit_cases.assert_alike(place / "run", reference)
    except AssertionError as error:
        return Outcome(case, LOST, f"they end otherwise than undisturbed: {one_line(error)}")
    return Outcome(case)


def compete(work: Work, bench: Bench, place: Path, chance: random.Random) -> Outcome:
    """Start two processes in one folder and kill one: each ends, is killed, or is told who holds the folder."""
    reference, facts = undisturbed(work, bench)
    folder, trap, later = place / "run", facts.trap(chance, ("SIGKILL", "operation")), facts.seconds * chance.random()
    case = f"two of {work.name}, the second {later:.2f} s later, {trap} in the first"
    first = traps.begin(work.target, folder, *work.args, trap=trap, log=place / "first")
    first.process.join(timeout=later)
    second = traps.begin(work.target, folder, *work.args, trap=Trap("operation", 10**9), log=place / "second")
    codes = traps.finish(first, Trap(trap.how, max(0.0, trap.number - later)), LIMIT), traps.finish(second, None, LIMIT)
    if None in codes:
        return Outcome(case, HUNG, f"they ended with {codes}")
    for process, code in zip((first, second), codes, strict=True):
        if code not in (0, -9) and "is in use by another process" not in process.error:
            return Outcome(case, FOREIGN, f"{code}: {last_line(process.error)}")
    last = traps.begin(work.target, folder, *work.args, trap=None, log=place / "last")
    if (code := traps.finish(last, None, LIMIT)) != 0:
        return Outcome(case, LOST, f"it does not resume ({code}): {last_line(last.error)}")
    try:
        work.compare(folder, reference)
    except (AssertionError, OSError) as error:
        return Outcome(case, LOST, f"it ends otherwise than undisturbed: {one_line(error)}")
    return Outcome(case)


def attempts(bench: Bench) -> Iterator[Attempt]:
    """Take the two kinds in turn."""
    for index, chance in enumerate(bench.chances(), bench.begin):
        if index % 2:
            name = chance.choice(TOGETHER)
            yield Attempt(f"two processes, {name}", lambda place, n=name, c=chance: kill_one(n, bench, place, c))
        else:
            work = chance.choice(list(kills.TRAININGS.values()))
            yield Attempt(f"one folder, {work.name}", lambda place, w=work, c=chance: compete(w, bench, place, c))
