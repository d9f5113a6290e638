"""Grids: many runs, in worker processes on this machine or on a Ray cluster; what is finished is skipped."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from segue.border import PositiveInt, checked
from segue.errors import ConfigError, MissingExtraError, SegueError, nearest, printable
from segue.lab.config import Run
from segue.lab.run import is_finished, run
from segue.reporting.formatting import duration
from segue.training.progress import Progress


@checked
@dataclass(frozen=True)
class Experiment:
    """Where a list of runs comes from: a file with a function `runs`, and the options it gets.

    Each worker reads the file itself, so a run may hold anything that Python can express, and nothing is pickled.
    """

    place: str  # a file, or the name of a module
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    @checked
    def from_dict(cls, saved: dict[str, Any]) -> Experiment:
        """Read an experiment from grid.json."""
        place, options = saved.get("place"), saved.get("options")
        if not (isinstance(place, str) and isinstance(options, dict)):
            found = f"They are {place!r:.40} and {options!r:.40}."
            raise ConfigError("grid.json must have a place and its options.", found, "repeat `segue grid`.")
        return cls(place, options)

    def runs(self) -> list[Run]:
        """Return the runs."""
        function = getattr(self._module(), "runs", None)
        if not callable(function):
            raise ConfigError(
                f"the experiment {self.place} has no function `runs`.",
                "Segue calls it to get the runs.",
                "write `def runs(seeds=3): return [...]`, a function that returns a list of Run.",
            )
        parameters = inspect.signature(function).parameters
        for name in self.options:
            if name not in parameters:
                fault = f"the experiment {self.place} has no option {name!r}."
                raise ConfigError(fault, nearest(name, list(parameters)), "see its `runs`.")
        if missing := [p.name for p in parameters.values() if p.default is p.empty and p.name not in self.options]:
            fault = f"the experiment {self.place} needs the option {missing[0]!r}."
            raise ConfigError(fault, "It has no default.", f"give -o {missing[0]}=VALUE; the head of the file says which.")
        runs = self._run(lambda: function(**self.options))
        if not (isinstance(runs, list | tuple) and runs and all(isinstance(run, Run) for run in runs)):
            raise ConfigError(
                f"`runs` of the experiment {self.place} must return a list of Run.",
                f"It returns {runs!r:.60}.",
                "return [preset.run(variant, seed=seed), ...].",
            )
        names = [run.name for run in runs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(
                f"the experiment {self.place} has two runs called {min(twice)!r}.",
                "A run's name is its method, group and seed.",
                "give the two runs different groups.",
            )
        return list(runs)

    def _module(self) -> Any:
        if not self.place.endswith(".py"):
            try:
                return importlib.import_module(self.place)
            except ModuleNotFoundError as error:
                if error.name is None or not self.place.startswith(error.name):
                    raise
                raise self._absent("module") from None
        if not Path(self.place).is_file():
            raise self._absent("file")
        spec = importlib.util.spec_from_file_location(f"experiment_{Path(self.place).parent.name}", self.place)
        assert spec is not None
        assert spec.loader is not None
        loader = spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses of the file look themselves up
        self._run(lambda: loader.exec_module(module))
        return module

    def _run(self, code: Callable[[], Any]) -> Any:
        """Run code of the experiment; what it raises is a mistake in its file."""
        try:
            return code()
        except SegueError:
            raise
        except (Exception, SystemExit) as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.place]
            line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
            raise ConfigError(
                f"the experiment {self.place} fails.",
                f"It raises {type(error).__name__} in line {line}: {error}",
                "correct the file; `python FILE` shows more if its head is at fault.",
            ) from error

    def _absent(self, kind: str) -> ConfigError:
        return ConfigError(
            f"there is no experiment {self.place}.",
            f"No {kind} has that name.",
            "give a file with a function `runs`, or the name of a module that has one.",
        )


@dataclass(frozen=True)
class Outcome:
    """How one run of a grid ended."""

    name: str
    ok: bool
    seconds: float
    why: str = ""


Engine = Literal["local", "ray"]


@checked
def describe_grid(experiment: Experiment, *, workers: PositiveInt, engine: Engine) -> dict[str, Any]:
    """Return what grid.json says."""
    return {"place": experiment.place, "options": experiment.options, "workers": workers, "engine": engine}


@checked
def run_grid(experiment: Experiment, out: Path, *, workers: PositiveInt = 1, engine: Engine = "local") -> list[Outcome]:
    """Carry out every run that has no result yet, and return how each ended; a failed run does not stop the others."""
    engines: dict[str, Callable[..., Iterator[Outcome]]] = {"local": _in_processes, "ray": _on_ray}
    runs = experiment.runs()
    waiting = [run.name for run in runs if not is_finished(run, out / run.name)]
    _say(f"{len(runs)} runs, {len(runs) - len(waiting)} finished before, {len(waiting)} to do; results in {out}")
    outcomes = []
    say = Progress("grid", max(1, len(waiting)))
    for outcome in engines[engine](experiment, waiting, out, workers):
        outcomes.append(outcome)
        how = f"{'finished' if outcome.ok else 'FAILED'} {outcome.name} in {duration(outcome.seconds)}"
        say(len(outcomes), how) if say.terminal else _say(f"[{len(outcomes)}/{len(waiting)}] {how}")
    return outcomes


def run_named(experiment: Experiment, name: str, out: Path) -> None:
    """Carry out one run of an experiment, found by its name."""
    (found,) = [run for run in experiment.runs() if run.name == name]
    run(found, out / name, wait=True)  # another grid may be at it


def _in_processes(experiment: Experiment, names: list[str], out: Path, workers: int) -> Iterator[Outcome]:
    """Run this many worker processes at a time; they share the cores."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    waiting, running = list(reversed(names)), dict[str, tuple[subprocess.Popen[bytes], float]]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                name = waiting.pop()
                running[name] = (_start(experiment, name, out, threads), time.monotonic())
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
    arguments = [experiment.place, json.dumps(experiment.options), name, str(out)]
    with (out / name / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "segue.lab.grid", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "SEGUE_PARENT": str(os.getpid())},
            start_new_session=True,  # Ctrl-C reaches the grid, which then tells its workers to save
        )


def _last_lines(folder: Path, code: int) -> str:
    """Return the last lines that a failed run wrote, and the signal that killed it, if one did."""
    lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    killed = [f"the worker was killed by {signal.Signals(-code).name}"] if code < 0 else []
    return "\n".join([*lines[-3:], *killed])


def _on_ray(experiment: Experiment, names: list[str], out: Path, workers: int) -> Iterator[Outcome]:
    """Spread the runs over a Ray cluster whose machines share the folder of results."""
    try:
        import ray
    except ImportError:
        raise MissingExtraError("the engine ray is not available.", "Ray is not installed.", "pip install segue[ray]") from None
    out = out.resolve()  # the workers have other current folders
    if experiment.place.endswith(".py"):
        experiment = replace(experiment, place=str(Path(experiment.place).resolve()))
    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False, include_dashboard=False)  # the cluster of RAY_ADDRESS, or one on this machine
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    cores = max(1.0, resources.get("CPU", 1.0) / workers)
    gpus = min(1.0, resources.get("GPU", 0.0))

    @ray.remote(num_cpus=cores, num_gpus=gpus, max_retries=2)
    def work(name: str) -> tuple[bool, float, str]:
        import torch

        torch.set_num_threads(max(1, int(cores)))
        begun = time.monotonic()
        try:
            run_named(experiment, name, out)
        except Exception as error:  # a failed run is listed, the others continue
            return False, time.monotonic() - begun, str(error)
        return True, time.monotonic() - begun, ""

    try:
        pending = {work.remote(name): name for name in names}
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


def main(place: str, options: str, name: str, out: str) -> int:
    """Carry out one run as a worker process, and return the exit code."""
    stop_with_parent()
    try:
        run_named(Experiment(place, json.loads(options)), name, Path(out))
    except SegueError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
