"""The live report: the same page, served on this machine alone, while runs are under way."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import dataclass, replace
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from segue.errors import ConfigError, SegueError
from segue.lab.report.data import page_data
from segue.lab.report.page import page
from segue.lab.report.source import read_grid
from segue.lab.report.summary import summarize
from segue.reporting import packed, records
from segue.reporting.formatting import counted
from segue.reporting.records import Point, Result

HOST = "127.0.0.1"
CONVERTED = "segue.json"  # of a finished conversion, whose training/ has its evaluations
WATCHED = (CONVERTED, records.FILE, records.BEGUN, "metrics.jsonl", packed.FILE)  # what a page is made from


class Live:
    """The page of a folder as it is now; it is made anew when a file of its runs has changed."""

    def __init__(self, folder: Path, *, title: str | None = None, reference: str | None = None) -> None:
        self.folder, self.title, self.reference = folder, title, reference
        self._lock = threading.Lock()
        self._made: tuple[Any, dict[str, Any]] | None = None

    def data(self) -> tuple[str, dict[str, Any]]:
        """Return what the page shows, and a tag that changes with it."""
        with self._lock:
            files = [path for name in WATCHED for path in (self.folder / name, *sorted(self.folder.glob(f"*/{name}")))]
            state = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files if path.is_file()]
            tag = sha256(repr(state).encode()).hexdigest()[:16]
            if self._made is None or self._made[0] != tag:
                self._made = (tag, self._make())
            return self._made

    def page(self) -> str:
        """Return the page, which then asks for newer data by itself."""
        return page(self.data()[1], live=True)

    def _make(self) -> dict[str, Any]:
        finished, under_way = read_finished(self.folder), read_under_way(self.folder)
        if (self.folder / CONVERTED).is_file():
            finished, under_way = [*finished, *under_way], []
        results = [*finished, *(result for result in under_way if result.train_info.points)]
        try:
            summary = summarize(results, reference=self.reference)
        except ConfigError:  # the reference has no evaluation yet
            summary = summarize(results)
        title = self.title or " and ".join(summary.experiments) or self.folder.resolve().name
        data = page_data(summary, results, title)
        return _unfinished(data, len(finished), len(under_way)) if under_way or not results else data


def read_finished(folder: Path) -> list[Result]:
    """Read the finished runs of a grid; none while it has none."""
    try:
        return read_grid(folder).results
    except SegueError:
        return []


def read_under_way(folder: Path) -> list[Result]:
    """Read the runs, or the conversion, of a folder that are under way."""
    found = []
    for path in (folder / records.BEGUN, *sorted(folder.glob(f"*/{records.BEGUN}"))):
        if path.is_file() and not path.with_name(records.FILE).is_file():
            found.append(_with_perplexity(records.read_begun(path)))
    return found


def _with_perplexity(result: Result) -> Result:
    """Add the perplexity to the scores of a conversion, whose evaluations have its logarithm."""
    train = result.train_info
    if train.score != "perplexity":
        return result

    def added(scores: dict[str, float]) -> dict[str, float]:
        loss = scores.get("loss")
        return scores if loss is None else scores | {"perplexity": math.exp(min(loss, 100.0))}

    def at(point: Point) -> Point:
        return replace(point, blend=added(point.blend), students=added(point.students))

    points = [at(point) for point in train.points]
    scores: dict[str, Any] = {
        "teacher": added(train.teacher),
        "teacher_eval": added(train.teacher_eval),
        "final": added(train.final),
    }
    return replace(result, train_info=replace(train, points=points, **scores))


def _unfinished(data: dict[str, Any], finished: int, under_way: int) -> dict[str, Any]:
    """Say that runs are under way, and compare nothing before they are finished."""
    said = f"{counted(under_way, 'run')} under way, {finished} finished"
    said += "; scores are those of the last evaluations so far." if data["groups"] else "; there is no evaluation yet."
    if not (under_way or finished):
        said = "No run has begun yet; a teacher that a run needs trains first."
    groups = [
        {
            **group,
            "rows": [{**row, "mark": ""} for row in group["rows"]],
            "wins": {name: {**win, "mark": ""} for name, win in group["wins"].items()},
            "comparisons": [],
            "findings": [],
        }
        for group in data["groups"]
    ]
    first = data["answer"][:1]
    return {**data, "answer": [*first, said], "findings": [], "groups": groups}


@dataclass
class Seen:
    """Which state of the page a browser has asked for last."""

    tag: str | None = None


def server(live: Live, port: int = 0) -> tuple[ThreadingHTTPServer, Seen]:
    """Return a server of the page on this machine's own address, and what it has last shown; port 0 is any that is free."""
    seen = Seen()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            own = f":{made.server_address[1]}"
            if self.headers.get("Host") not in (
                f"{HOST}{own}",
                f"localhost{own}",
            ):  # another name for this address: a page elsewhere asks
                self._answer(403, "text/plain", b"")
            elif self.path in ("/", "/data"):
                self._show()
            else:
                self._answer(404, "text/plain", b"")

        def _show(self) -> None:
            tag, data = live.data()
            if self.path == "/":
                self._answer(200, "text/html; charset=utf-8", live.page().encode())
                return
            seen.tag = tag
            if self.headers.get("If-None-Match") == tag:
                self._answer(304, "application/json", b"")
            else:
                self._answer(200, "application/json", json.dumps(data, allow_nan=False).encode(), tag)

        def _answer(self, status: int, kind: str, content: bytes, tag: str | None = None) -> None:
            self.send_response(status)
            for name, value in (("Content-Type", kind), ("Content-Length", str(len(content))), ("Cache-Control", "no-store")):
                self.send_header(name, value)
            if tag is not None:
                self.send_header("ETag", tag)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing: the terminal belongs to the training."""

    made = _bound(Handler, port)
    return made, seen


def _bound(handler: type[BaseHTTPRequestHandler], port: int) -> ThreadingHTTPServer:
    try:
        made = ThreadingHTTPServer((HOST, port), handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"the page cannot be served on port {port}.", f"The system says: {error}.", "give another --port, or none."
        ) from None
    made.daemon_threads = True
    return made
