"""The process in which mutants run: it has loaded everything but Segue, and forks for every run of tests.

`python -m tests.mutation` starts it in a copy of the repository. It reads requests and writes answers, a line of JSON each.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest

COLD = ("segue", "tests", "benchmarks", "experiments", "torch._dynamo", "torch._inductor", "__main__", "conftest")
OUT_OF_TIME, BROKEN = 9, 10  # exit codes, next to those of pytest
WAITING = 4  # a test may take so many times its limit of computing time, because the machine may be busy


class Chosen:
    """Run these tests in this order, each with a limit of computing time, and remember the first that fails."""

    def __init__(self, tests: dict[str, float], answer: Path) -> None:
        self.limits = tests
        self.answer = answer
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = {name: i for i, name in enumerate(self.limits)}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        def end(*_: Any) -> None:
            self.answer.write_text(item.nodeid, encoding="utf-8")
            os._exit(OUT_OF_TIME)

        limits = {(signal.ITIMER_PROF, signal.SIGPROF): 1, (signal.ITIMER_REAL, signal.SIGALRM): WAITING}
        for (timer, sent), times in limits.items():
            signal.signal(sent, end)
            signal.setitimer(timer, times * self.limits[item.nodeid])
        yield
        for timer, _ in limits:
            signal.setitimer(timer, 0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


class Collect:
    """Note which lines of the package each test runs, how long it takes, and what it has loaded in the end."""

    def __init__(self, package: Path) -> None:
        import coverage

        self.coverage = coverage.Coverage(data_file=None, source=[str(package)], config_file=False)
        self.package = package
        self.tests: dict[str, dict[str, Any]] = {}
        self.coverage.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.coverage.switch_context(item.nodeid)
        marks = [name for name in ("slow", "processes") if item.get_closest_marker(name)]
        self.tests[item.nodeid] = {"seconds": 0.0, "passed": True, "marks": marks, "lines": {}}
        yield
        self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests[report.nodeid]
        test["seconds"] += report.duration
        test["passed"] &= report.passed or report.skipped

    def result(self) -> dict[str, Any]:
        self.coverage.stop()
        data = self.coverage.get_data()
        for file in data.measured_files():
            name = Path(file).relative_to(self.package).as_posix()
            for line, tests in data.contexts_by_lineno(file).items():
                for test in tests:
                    if test:
                        self.tests[test]["lines"].setdefault(name, []).append(line)
        loaded = [name for name, module in sys.modules.items() if getattr(module, "__spec__", None) and not _cold(name)]
        return {"tests": self.tests, "loaded": loaded}


def _cold(name: str) -> bool:
    return any(name == cold or name.startswith(f"{cold}.") for cold in COLD)


def load(names: list[str]) -> None:
    """Import what tests will need; torchvision needs Segue's help, which is lent by its file alone."""
    spec = importlib.util.spec_from_file_location("lent_by_segue", "src/segue/core/torchvision_cpu.py")
    assert spec is not None
    assert spec.loader is not None
    lent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lent)
    lent.prepare_for_torchvision()
    globals()["lent"] = lent  # its declarations live as long as it does
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            with contextlib.suppress(BaseException):
                importlib.import_module(name)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, lent._BeforeTorchvision)]
    assert "segue" not in sys.modules


def run(request: dict[str, Any]) -> tuple[int, str]:
    """Run tests in this process; return pytest's exit code and the first test that failed."""
    quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins are loaded already
    common = [*quiet, f"--basetemp={request['temporary']}", *request["paths"]]
    if request.get("collect"):
        collect = Collect(Path("src/segue").resolve())
        code = pytest.main(common, plugins=[collect])
        Path(request["collect"]).write_text(json.dumps(collect.result()), encoding="utf-8")
        return int(code), ""
    sys.dont_write_bytecode = True
    chosen = Chosen(request["tests"], Path(request["answer"]))
    code = pytest.main(["-x", "--tb=no", *common], plugins=[chosen])
    return int(code), chosen.failed


def forked(request: dict[str, Any]) -> dict[str, Any]:
    """Run tests in a fork, end it and all its children when its time is over, and return what happened."""
    answer = Path(request["answer"])
    answer.unlink(missing_ok=True)
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        with open(os.devnull) as nothing, Path(request["log"]).open("w") as log:
            os.dup2(nothing.fileno(), 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        code = BROKEN
        try:
            code, failed = run(request)
            answer.write_text(failed, encoding="utf-8")
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    status = None
    while time.monotonic() - began < request["limit"]:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        time.sleep(0.02)
    else:
        status = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # the group of this fork alone, with the processes that its tests have started
    if status is None:
        os.waitpid(pid, 0)
    code = OUT_OF_TIME if status is None else os.waitstatus_to_exitcode(status)
    failed = answer.read_text(encoding="utf-8") if answer.exists() else ""
    return {"code": code, "failed": failed, "seconds": round(time.monotonic() - began, 2)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    load(json.loads(sys.stdin.readline()))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(forked(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
