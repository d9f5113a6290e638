"""`segue report`: the page of a grid, written once or served while runs are under way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from segue.cli.arguments import neighbours
from segue.cli.terminal import console, print_json, say
from segue.errors import ConfigError

LAST_LOOK = 4.0  # seconds in which an open page may still ask for the end of a training


def show(
    folder: Path,
    *,
    out: Path | None,
    title: str | None,
    reference: str | None,
    everything: bool,
    opens: bool,
    as_json: bool = False,
) -> None:
    """Write the report of a grid, print its tables, and name the runs that it leaves out."""
    from segue.cli.demo import show_summary
    from segue.cli.report_data import as_data
    from segue.lab.report.page import write
    from segue.lab.report.source import left_out, read_grid
    from segue.lab.report.summary import summarize
    from segue.reporting.palette import require_matplotlib

    _require_folder(folder)
    require_matplotlib()
    source = read_grid(folder, everything=everything)
    summary = summarize(source.results, reference=reference)
    page = write(source, summary, folder if out is None else out, title)
    if as_json:
        print_json({"page": str(page), **as_data(summary)})
    else:
        show_summary(summary, console)
        for line in left_out(source.strangers):
            say(line)
        say(f"\nNext: open {page}")
    if opens:
        webbrowser.open(page.resolve().as_uri())


def watch(folder: Path, *, title: str | None, reference: str | None, port: int, opens: bool) -> None:
    """Serve the report of a folder on this machine until Ctrl-C, or until the command that has started this one has ended."""
    from segue.lab.report.live import Live, server

    parent = int(os.environ.get("SEGUE_PARENT", 0))
    if not parent:
        _require_folder(folder)
    live = Live(folder, title=title, reference=reference)
    made, seen = server(live, port)
    address = f"http://{made.server_address[0]!s}:{made.server_address[1]}/"
    threading.Thread(target=made.serve_forever, daemon=True).start()
    say(f"The report, while runs are under way: {address}")
    if opens:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()  # some commands of browsers wait
    try:
        with _ended_by_signal() as ended:
            while not ended.wait(0.3) and (not parent or os.getppid() == parent):
                pass
    except KeyboardInterrupt:
        pass
    deadline = time.monotonic() + LAST_LOOK
    while seen.tag is not None and seen.tag != live.data()[0] and time.monotonic() < deadline:
        time.sleep(0.1)
    made.shutdown()
    made.server_close()


@contextmanager
def watching(folder: Path, *, opens: bool) -> Iterator[None]:
    """Serve the report of a folder in another process while a command trains there, and open it; only if that is asked for."""
    if not opens or int(os.environ.get("RANK", 0)) > 0:
        yield
        return
    command = [sys.executable, "-m", "segue", "report", str(folder), "--watch", "--open"]
    own: dict[str, Any] = {
        "start_new_session": True,
        "env": {**os.environ, "SEGUE_PARENT": str(os.getpid()), "OMP_NUM_THREADS": "1"},
    }
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **own)
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2 * LAST_LOOK)
        if process.poll() is None:
            process.kill()


@contextmanager
def _ended_by_signal() -> Iterator[threading.Event]:
    ended = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        yield ended
    finally:
        signal.signal(signal.SIGTERM, before)


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder.", neighbours(folder), "give the folder of a grid.")
