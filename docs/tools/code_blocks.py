"""Show code in at most 88 columns, which fit beside a navigation and on half a screen; the files keep their 128.

Python is formatted by ruff. In a command of the shell, a comment behind it moves above it, and options continue below. Text
(formulas, what a command prints) continues below at a gap between its parts, or wraps. In prose no line breaks inside an
option or before a %, and a path breaks between its parts, so that the columns of a table leave room for each other.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from functools import cache

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from segue.cli.help import example_lines

WIDTH = 88
BLOCK = re.compile(r"^( *)```([^`\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r" +# ")
PATH = re.compile(r"(?<=[\s>])\w+(?:/[\w.]+)+/[\w.]{12,}")
PRE = re.compile(r"(<pre.*?</pre>)", re.DOTALL)
GAP = re.compile(r" {4,}")
OPTION = re.compile(r"(<code>|[\s(])(--?[a-z][\w-]*)(?=[^<>]*</code>)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Narrow the blocks of a page; `no-run` is gone by then."""
    return narrowed(markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Say where lines of prose may break."""
    pieces = PRE.split(html)
    return "".join(piece if index % 2 else breaking(piece) for index, piece in enumerate(pieces))


def breaking(prose: str) -> str:
    """Keep options in inline code, and each % with its number, in one line; let paths continue below."""
    prose = OPTION.sub(r'\1<span class="option">\2</span>', prose)
    prose = PATH.sub(lambda match: re.sub(r"([/_])", r"\1<wbr>", match[0]), prose)
    return re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", prose)


def narrowed(markdown: str) -> str:
    """Rewrite the blocks with a line that is too long."""

    def rewrite(match: re.Match[str]) -> str:
        indent, kind, code = match.groups()
        lines = [line.removeprefix(indent) for line in code.splitlines()]
        if kind not in ("python", "sh", "text", "") or max(map(len, lines), default=0) <= WIDTH:
            return match[0]
        if kind in ("text", ""):
            text = "".join(f"{indent}{line}\n" for each in lines for line in at_gaps(each))
            return f"{indent}```{{ .text .wrapped }}\n{text}{indent}```"
        text = python("\n".join(lines) + "\n") if kind == "python" else "\n".join(map(shell, lines)) + "\n"
        shown = "".join(f"{indent}{line}\n" if line else "\n" for line in text.splitlines())
        return f"{indent}```{kind}\n{shown}{indent}```"

    return BLOCK.sub(rewrite, markdown)


def at_gaps(line: str) -> list[str]:
    """Let what does not fit continue below, from a gap on."""
    text = line.lstrip()
    indent, shown, end = line[: len(line) - len(text)], [""], 0
    for start in [*(gap.start() for gap in GAP.finditer(text)), len(text)]:
        part, end = text[end:start], start
        fits = not shown[-1] or len(indent + shown[-1] + part) <= WIDTH
        shown += [shown.pop() + part] if fits else [f"    {part.lstrip()}"]
    return [indent + each for each in shown]


@cache
def python(code: str) -> str:
    """Format a block; what ruff cannot parse, and a long comment or string, stay as they are."""
    moved = "\n".join(_comment_above(line) for line in code.splitlines()) + "\n"
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "--isolated",
        "--line-length",
        str(WIDTH),
        "--stdin-filename",
        "block.py",
        "-",
    ]
    done = subprocess.run(command, input=moved, capture_output=True, text=True, encoding="utf-8")
    return code if done.returncode else done.stdout


def shell(line: str) -> str:
    """Break a long command."""
    if len(line) <= WIDTH:
        return line
    *above, command = _comment_above(line).split("\n")
    if command.startswith("#"):
        return "\n".join([*above, command])
    return "\n".join([*above, example_lines(command, WIDTH - 2).replace("\n  ", "\n").removeprefix("  ")])


def _comment_above(line: str) -> str:
    """Put a comment behind a line above it, if the line is too long."""
    if len(line) <= WIDTH:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    for mark in COMMENT.finditer(line):
        code = line[: mark.start()]
        if code.count("'") % 2 == code.count('"') % 2 == 0 and code.strip():  # else it is inside a string
            return f"{_comment(line[mark.end() :], indent)}\n{code}"
    return _comment(line.lstrip("# "), indent) if line.startswith(f"{indent}# ") else line


def _comment(text: str, indent: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ", break_on_hyphens=False)
