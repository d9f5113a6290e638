"""Write the guides as notebooks, so that there is one text: docs/guides/*.md become docs/notebooks/*.ipynb, without outputs.

python docs/tools/notebooks.py    # after a guide was changed; a test compares
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jupytext
import nbformat

DOCS = Path(__file__).parents[1]
GUIDES = sorted((DOCS / "guides").glob("[0-9]-*.md"))
NOTEBOOKS = DOCS / "notebooks"
EXTRA = re.compile(r'pip install "segue\[([\w,]+)\]"')
PICTURE = re.compile(r"!\[(.*?)\]\(\.\./figures/(guide-[\w-]+\.png)\)")
PRINTED = re.compile(r"^```\n\n```text\n.*?^```\n", re.MULTILINE | re.DOTALL)  # behind the cell that prints it
INSTALL = """import importlib.util

if importlib.util.find_spec("segue") is None:  # in Colab, for example
    %pip install -q "segue[{extras}]"
"""


def notebook(guide: Path) -> Any:
    """Return a guide as a notebook whose first cell installs what is missing."""
    text = guide.read_text(encoding="utf-8")
    extras = EXTRA.findall(text)
    made = jupytext.reads(_markdown(text), fmt="md")
    made.cells.insert(0, nbformat.v4.new_code_cell(INSTALL.format(extras=extras[0] if extras else "lab").rstrip()))
    pictures = {path: alt for alt, path in PICTURE.findall(text)}
    for number, cell in enumerate(made.cells):
        if cell.cell_type == "code":
            cell.source = with_picture(cell.source, pictures)
        cell.id, cell.metadata = f"cell-{number}", {}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return made


def with_picture(code: str, pictures: dict[str, str]) -> str:
    """Let a cell that draws a picture into a file show it: no file is there before the cell runs, and Colab reads none."""
    for path, alt in pictures.items():
        if f'"{path}"' in code:
            return f'{code}\n\nfrom IPython.display import Image\n\nImage("{path}", width=640, alt="{alt}")'
    return code


def written(guide: Path) -> str:
    """Return the content of a guide's notebook."""
    return nbformat.writes(notebook(guide), version=4) + "\n"


def _markdown(text: str) -> str:
    """Unfold what the page folds, leave out the pictures and texts that the cells make, and point links at the pages."""
    text = re.sub(r"<summary>(.*?)</summary>", r"*\1*", re.sub(r"</?details>\n?", "", text))
    text = re.sub(PRINTED, "```\n", text)
    text = re.sub(PICTURE.pattern + r"\n*", "", text)
    return re.sub(r"\]\((?!https?:|\.\./|#)([^)]+)\)", r"](../guides/\1)", text)


if __name__ == "__main__":
    NOTEBOOKS.mkdir(exist_ok=True)
    for guide in GUIDES:
        (NOTEBOOKS / f"{guide.stem}.ipynb").write_text(written(guide), encoding="utf-8")
