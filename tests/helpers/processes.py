"""Processes for the tests: a fresh one, ranks of a gloo group, a run of the interpreter.

Ctrl-C reaches a fresh process and a rank also where the tests run in the background of a script, which ignores SIGINT.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
PRELOADED = (__name__, "accelerate", "segue.training.fit", "torch._dynamo")  # the last by an optimizer's first step
Job = Callable[[], Any]


class FreshProcess:
    """A process forked from one that has imported everything and computed nothing, so that it starts at once."""

    def __init__(self, target: Callable[..., Any], *args: Any, log: Path) -> None:
        self.log = log
        self.process: BaseProcess = _context().Process(target=_enter, args=(target, args, str(log)))
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def entered(self) -> bool:
        """Whether its own code runs already, and not only what starts a process."""
        return self.log.exists()

    @property
    def error(self) -> str:
        """The traceback of what ended the process."""
        return self.log.read_text() if self.log.exists() else ""

    def wait(self) -> int:
        """Wait for the process and return its exit code, negative for the signal that killed it."""
        self.process.join(timeout=600)  # only for what hangs
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"the process did not end: {self.error}")
        return self.process.exitcode

    def check(self) -> None:
        """Wait for the process and require that it succeeds."""
        assert self.wait() == 0, self.error


class Ranks:
    """What jobs return in each process of a gloo group; all jobs share the processes."""

    def __init__(self, jobs: Mapping[str, Job], folder: Path, world: int = 2) -> None:
        ranks = [FreshProcess(_be_rank, rank, world, jobs, folder, log=folder / f"log{rank}") for rank in range(world)]
        for process in ranks:
            process.check()
        self.results = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world)]

    def __getitem__(self, job: str) -> list[Any]:
        """Return a job's result in every process; its traceback fails the test."""
        found = [results[job] for results in self.results]
        for result in found:
            if isinstance(result, str) and result.startswith("Traceback"):
                raise AssertionError(result)
        return found


def run_python(*arguments: object, check: bool = True, env: Mapping[str, str] | None = None, **settings: Any) -> Any:
    """Run this interpreter and return the completed process, whose output is text; by default require that it succeeds."""
    settings |= {"env": {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}, "stdin": subprocess.DEVNULL}
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, **settings)
    assert done.returncode == 0 or not check, f"{done.stdout}\n{done.stderr}"
    return done


def _context() -> Any:
    """Return the start method of fresh processes, with their common origin running."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(list(PRELOADED))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before]))  # to find this module
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return made


def _enter(target: Callable[..., Any], args: tuple[Any, ...], log: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    try:
        Path(log).touch()  # from here on, whatever ends the process is written there
        target(*args)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's own end would say nothing of it
    except BaseException:
        Path(log).write_text(traceback.format_exc())
        raise


def _be_rank(rank: int, world: int, jobs: Mapping[str, Job], folder: Path) -> None:
    """Run all jobs as one process of a group, launched as torchrun does it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ |= dict(zip(names, map(str, (rank, rank, world, world)), strict=True)) | {"OMP_NUM_THREADS": "1"}
    store, timeout = f"file://{folder}/store", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
    results: dict[str, Any] = {}
    for name, job in jobs.items():
        try:
            results[name] = job()
        except Exception:
            results[name] = traceback.format_exc()
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()
