"""Let the API reference show docstrings as written: examples as code, the comment behind a setting as its description.

Examples have at most 88 columns here, as the code of the other pages (code_blocks.py).
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

from griffe import Attribute, Docstring, Extension, Object

DOCTEST = re.compile(r"^ *>>> .*(?:\n *\S.*)*", re.MULTILINE)
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"  # (?!type:|noqa)(.+)$")
WIDTH = 88


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
    fenced = DOCTEST.sub(lambda match: f"```pycon\n{_narrowed(match[0])}\n```", text)
    pieces = CODE.split(fenced)  # prose, code, prose, code, ...
    return "".join(piece if index % 2 else piece.replace("<", "&lt;") for index, piece in enumerate(pieces))


def _narrowed(example: str) -> str:
    """Format an example with a line that is too long, as code inside of a docstring; what it prints stays as it is."""
    if max(map(len, example.splitlines())) <= WIDTH:
        return example
    settings = ("format.docstring-code-format=true", f"format.docstring-code-line-length={WIDTH - len('>>> ')}")
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--stdin-filename", "example.py"]
    command += [part for setting in settings for part in ("--config", setting)]
    quoted = f'r"""Example.\n\n{example}\n"""\n'
    done = subprocess.run([*command, "-"], input=quoted, capture_output=True, text=True, encoding="utf-8")
    return example if done.returncode else done.stdout.partition("\n\n")[2].rpartition('\n"""')[0]
