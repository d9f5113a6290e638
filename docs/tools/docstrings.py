"""Let the API reference show docstrings as written: examples as code, the comment behind a setting as its description."""

from __future__ import annotations

import re
from typing import Any

from griffe import Attribute, Docstring, Extension, Object

DOCTEST = re.compile(r"^ *>>> .*(?:\n *\S.*)*", re.MULTILINE)
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"  # (?!type:|noqa)(.+)$")


class AsWritten(Extension):
    """Fence doctests, keep <words in brackets> from being read as HTML, and read comments behind attributes."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Change one object's docstring, or give it one."""
        if obj.docstring is not None:
            obj.docstring.value = _as_markdown(obj.docstring.value)
        elif isinstance(obj, Attribute) and obj.lineno is not None and not obj.name.startswith("_"):
            line = obj.lines_collection[obj.filepath][(obj.endlineno or obj.lineno) - 1]
            if comment := COMMENT.search(line):
                obj.docstring = Docstring(_as_markdown(comment[1]), lineno=obj.lineno, parent=obj)


def _as_markdown(text: str) -> str:
    fenced = DOCTEST.sub(lambda match: f"```pycon\n{match[0]}\n```", text)
    pieces = CODE.split(fenced)  # prose, code, prose, code, ...
    return "".join(piece if index % 2 else piece.replace("<", "&lt;") for index, piece in enumerate(pieces))
