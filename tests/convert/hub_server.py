"""A stand-in for the Hugging Face Hub on 127.0.0.1: what an upload and a download of one model need, kept in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0" * 40


class Hub(ThreadingHTTPServer):
    """The files of every model, and who may write."""

    def __init__(self, token: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.token = token
        self.models: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []  # their messages

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, found: Any, status: int = 200, **headers: str) -> None:
        body = found if isinstance(found, bytes) else json.dumps(found).encode()
        self.send_response(status)
        named = {"X-Repo-Commit": COMMIT, "Content-Length": str(len(body)), **headers}
        for name, value in named.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        path, body = urlsplit(self.path).path, self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.headers["Authorization"] != f"Bearer {self.server.token}":
            return self.answer({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.server.models.setdefault(name, {})
            return self.answer({"url": f"{self.server.address}/{name}", "id": name})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        name, what = path.removeprefix("/api/models/").rsplit("/", 2)[:2]
        if what == "preupload":
            files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in json.loads(body)["files"]]
            return self.answer({"files": files})
        assert what == "commit", path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                self.server.commits.append(line["value"]["summary"])
            elif line["key"] == "file":
                self.server.models[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self.answer({"commitUrl": f"{self.server.address}/{name}/commit/{COMMIT}", "commitOid": COMMIT})

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if "/resolve/" in path:
            name, _, rest = path.strip("/").partition("/resolve/")
            found = self.server.models.get(name, {}).get(rest.partition("/")[2])
            if found is None:
                return self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
            return self.answer(found, ETag=f'"{hashlib.sha256(found).hexdigest()}"')
        if path.startswith("/api/models/"):
            parts = path.removeprefix("/api/models/").split("/")
            name = "/".join(parts[:2])
            if name not in self.server.models:
                return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            files = self.server.models[name]
            if "tree" in parts:
                return self.answer([{"type": "file", "path": p, "size": len(b), "oid": "0"} for p, b in files.items()])
            return self.answer({"id": name, "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]})
        return self.answer({"error": f"{path} is unknown"}, 404)

    def do_HEAD(self) -> None:
        self.do_GET()


@contextmanager
def serving(token: str) -> Iterator[Hub]:
    """Serve until the block ends."""
    with Hub(token) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
