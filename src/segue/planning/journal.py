"""The journal of a plan: what was measured so far, so that an interrupted plan resumes.

folder/measured.jsonl    the key of the plan, then one line for each part of the work
folder/fit/              the students, and their optimizers, of the latest steps of the local fit
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from segue.core import files
from segue.errors import DataError

FILE = "measured.jsonl"


class Journal:
    """Keep measurements by name, in a folder or in memory alone."""

    def __init__(self, folder: Path | None, key: str) -> None:
        self.folder, self.key = folder, key
        self._known: dict[str, Any] = {}
        self.resumed = False  # an earlier process has measured something
        if folder is None:
            return
        lines = self._lines(folder / FILE)
        if lines and lines[0].get("key") != key:
            raise DataError(
                f"{folder} holds another plan.",
                "Its model, batches, candidates or settings differ from these.",
                "give the same ones, or another folder. Nothing was changed.",
            )
        self._known = {line["name"]: line["value"] for line in lines[1:]}
        self.resumed = bool(self._known)
        with files.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            written = "".join(f"{json.dumps(line)}\n" for line in ({"key": key}, *lines[1:]))
            (folder / f".{FILE}").write_text(written, encoding="utf-8")  # without a line that was cut off
            os.replace(folder / f".{FILE}", folder / FILE)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def __getitem__(self, name: str) -> Any:
        return self._known[name]

    def get(self, name: str) -> Any:
        """Return a measurement; None if it is not made yet."""
        return self._known.get(name)

    def write(self, name: str, value: Any) -> Any:
        """Remember a measurement and return it."""
        self._known[name] = value = json.loads(json.dumps(value))  # as a resumed plan will read it
        if self.folder is not None:
            with files.writing(self.folder), (self.folder / FILE).open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps({'name': name, 'value': value})}\n")
        return value

    @staticmethod
    def _lines(path: Path) -> list[dict[str, Any]]:
        """Read the lines of a journal; a last one that was cut off is left out."""
        if not path.exists():
            return []
        lines = files.content(path).decode("utf-8", "replace").split("\n")
        try:
            found = [json.loads(line) for line in lines[:-1]]
            for line in found[1:]:
                if not {"name", "value"} <= set(line):
                    raise ValueError("a line has no name, or no value")
            if found and not isinstance(found[0], dict):
                raise ValueError("its first line is not a key")
            return found
        except (ValueError, TypeError) as error:
            raise DataError(
                f"the measurements in {path} cannot be read.",
                f"{type(error).__name__}: {error}.",
                "delete the file, so that they are made again. Nothing was changed.",
            ) from None
