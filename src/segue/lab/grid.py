"""Grids: many runs, in worker processes on this machine or on a Ray cluster; what is finished is skipped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from segue.border import PositiveInt, checked
from segue.errors import MissingExtraError, SegueError, printable
from segue.lab.experiment import Experiment
from segue.lab.run import is_finished, run
from segue.reporting.formatting import duration
from segue.reporting.records import command
from segue.training.progress import Progress


@dataclass(frozen=True)
class Outcome:
    """How one run of a grid ended."""

    name: str
    ok: bool
    seconds: float
    why: str = ""


Engine = Literal["local", "ray"]
Jobs = dict[str, Experiment]  # the name of a run -> the experiment that has it


@checked
def describe_grid(experiment: Experiment, *, workers: PositiveInt, engine: Engine) -> dict[str, Any]:
    """Return what grid.json says."""
    return {**experiment.to_dict(), "workers": workers, "engine": engine}


@checked
def run_grid(experiment: Experiment, out: Path, *, workers: PositiveInt = 1, engine: Engine = "local") -> list[Outcome]:
    """Carry out every run that has no result yet, and return how each ended; a failed run does not stop the others."""
    runs = experiment.runs()
    waiting = {run.name: experiment for run in runs if not is_finished(run, out / run.name)}
    _say(f"{len(runs)} runs, {len(runs) - len(waiting)} finished before, {len(waiting)} to do; results in {out}")
    return run_jobs("grid", waiting, out, workers=workers, engine=engine)


def run_jobs(title: str, jobs: Jobs, out: Path, *, workers: int, engine: Engine) -> list[Outcome]:
    """Carry out runs of any experiments, each in a folder of its name, and return how each ended."""
    engines: dict[str, Callable[..., Iterator[Outcome]]] = {"local": _in_processes, "ray": _on_ray}
    outcomes = []
    say = Progress(title, max(1, len(jobs)))
    for outcome in engines[engine](jobs, out, workers):
        outcomes.append(outcome)
        how = f"{'finished' if outcome.ok else 'FAILED'} {outcome.name} in {duration(outcome.seconds)}"
        say(len(outcomes), how) if say.terminal else _say(f"[{len(outcomes)}/{len(jobs)}] {how}")
    return outcomes


def run_named(experiment: Experiment, name: str, out: Path) -> None:
    """Carry out one run of an experiment, found by its name."""
    (found,) = [run for run in experiment.runs() if run.name == name]
    run(found, out / name, wait=True)  # another grid may be at it


def worker_threads(workers: int) -> int:
    """Share the cores that this process may use among workers; each takes at most the threads that OMP_NUM_THREADS allows."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    share = max(1, cores // workers)
    return min(share, int(allowed)) if allowed.isdecimal() and int(allowed) > 0 else share


def _in_processes(jobs: Jobs, out: Path, workers: int) -> Iterator[Outcome]:
    """Run this many worker processes at a time; they share the cores."""
    threads = worker_threads(workers)
    waiting, running = list(reversed(jobs)), dict[str, tuple[subprocess.Popen[bytes], float]]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                name = waiting.pop()
                running[name] = (_start(jobs[name], name, out, threads), time.monotonic())
            time.sleep(0.1)
            for name, (process, begun) in list(running.items()):
                if process.poll() is not None:
                    del running[name]
                    why = "" if process.returncode == 0 else _last_lines(out / name, process.returncode)
                    yield Outcome(name, process.returncode == 0, time.monotonic() - begun, why)
    finally:
        for process, _ in running.values():  # the workers save and stop
            process.send_signal(signal.SIGTERM)
        for process, _ in running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)


def _start(experiment: Experiment, name: str, out: Path, threads: int) -> subprocess.Popen[bytes]:
    (out / name).mkdir(parents=True, exist_ok=True)
    arguments = [json.dumps(experiment.to_dict()), name, str(out)]
    with (out / name / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "segue.lab.grid", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "SEGUE_PARENT": str(os.getpid()), "SEGUE_COMMAND": command()},
            start_new_session=True,  # Ctrl-C reaches the grid, which then tells its workers to save
        )


def _last_lines(folder: Path, code: int) -> str:
    """Return the last lines that a failed run wrote, and the signal that killed it, if one did."""
    lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    killed = [f"the worker was killed by {signal.Signals(-code).name}"] if code < 0 else []
    return "\n".join([*lines[-3:], *killed])


def _on_ray(jobs: Jobs, out: Path, workers: int) -> Iterator[Outcome]:
    """Spread the runs over a Ray cluster whose machines share the folder of results."""
    try:
        import ray
    except ImportError:
        raise MissingExtraError("the engine ray is not available.", "Ray is not installed.", "pip install segue[ray]") from None
    out = out.resolve()  # the workers have other current folders
    jobs = {name: experiment.resolved() for name, experiment in jobs.items()}
    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False, include_dashboard=False)  # the cluster of RAY_ADDRESS, or one on this machine
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    cores = max(1.0, resources.get("CPU", 1.0) / workers)
    gpus = min(1.0, resources.get("GPU", 0.0))

    @ray.remote(num_cpus=cores, num_gpus=gpus, max_retries=2)
    def work(experiment: Experiment, name: str) -> tuple[bool, float, str]:
        import torch

        torch.set_num_threads(max(1, int(cores)))
        begun = time.monotonic()
        try:
            run_named(experiment, name, out)
        except Exception as error:  # a failed run is listed, the others continue
            return False, time.monotonic() - begun, f"{type(error).__name__}: {error}"
        return True, time.monotonic() - begun, ""

    try:
        pending = {work.remote(experiment, name): name for name, experiment in jobs.items()}
        while pending:
            (done,), _ = ray.wait(list(pending), num_returns=1)
            name = pending.pop(done)
            try:
                yield Outcome(name, *ray.get(done))
            except ray.exceptions.RayError as error:
                yield Outcome(name, False, 0.0, str(error))
    finally:
        if ours:
            ray.shutdown()


def stop_with_parent() -> None:
    """Make this process save and stop when the grid that started it has died."""
    parent = int(os.environ.get("SEGUE_PARENT", 0))
    if not parent:
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def main(experiment: str, name: str, out: str) -> int:
    """Carry out one run as a worker process, and return the exit code."""
    stop_with_parent()
    try:
        run_named(Experiment.from_dict(json.loads(experiment)), name, Path(out))
    except SegueError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
