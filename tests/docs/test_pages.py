"""The docs are true: their code runs, their links lead somewhere, their tables are the program's own.

python -m tests.docs.test_pages    # draws the pictures of the guides again, by the guides' own code
"""

import ast
import os
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional as F

import segue
from segue.students.attention.module import Operator
from tests.helpers.tiny import Net, batch

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "segue"
GUIDES = ROOT / "docs" / "guides"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
OPERATORS = {name for name, made in vars(segue.students).items() if isinstance(made, type) and issubclass(made, Operator)}
FENCE = re.compile(r"^```(.*?)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"\s*^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    code: str
    printed: str | None  # what the page says it prints: a block of text right behind it


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def python_blocks(page: Path) -> list[Block]:
    """Return the code to run, each block at its own line so that a traceback points into the page."""
    text = page.read_text(encoding="utf-8")
    blocks = []
    for match in FENCE.finditer(text):
        kind = match[1]
        assert kind in ("python", "python no-run") or "python" not in kind, kind
        if kind == "python":
            printed = PRINTED.match(text, match.end())
            line = text.count("\n", 0, match.start()) + 1
            blocks.append(Block("\n" * line + match[2], printed and printed[1]))
    return blocks


def brings_its_own_model(page: Path) -> bool:
    """Tell the pages that people paste from top to bottom: the front page and the guides."""
    return page == ROOT / "README.md" or page.parent == GUIDES


def prepared() -> dict[str, object]:
    """Make what the other pages call yours: a model with attention at blocks.*.attn, and batches of one epoch."""
    return {
        "torch": torch,
        "F": F,
        "pretrained": lambda: Net().train(),
        "model": Net().train(),
        "loader": [batch(seed) for seed in range(10)],
    }


def run(page: Path) -> None:
    """Run a page from top to bottom, and compare what it prints with what it says it prints."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        names = {} if brings_its_own_model(page) else prepared()
        for block in python_blocks(page):
            with redirect_stdout(StringIO()) as out:
                exec(compile(block.code, str(page), "exec"), names)
            assert block.printed is None or out.getvalue() == block.printed
    torch.set_num_threads(threads)


def pictures(page: Path) -> set[str]:
    """Return the pictures that a page's own code draws."""
    return set(re.findall(r"\]\(\.\./figures/(guide-[\w-]+\.png)\)", page.read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page) and page.parent != GUIDES], ids=name_of)
def test_the_code_on_a_page_runs(page, tmp_path, monkeypatch):
    """Of all pages but the guides, which run as notebooks: test_notebooks.py."""
    monkeypatch.chdir(tmp_path)
    run(page)


def test_the_guides_begin_with_one_and_the_same_model():
    first, *others = [python_blocks(page)[0].code.strip() for page in sorted(GUIDES.glob("[125]-*.md"))]
    assert others == [first, first]


def test_hardly_any_code_is_left_out():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert text.count("```python no-run") <= 2


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, heading = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), target
        assert goal.is_relative_to(ROOT), target
        assert not heading or heading in headings(goal), target


def headings(page: Path) -> set[str]:
    lines = FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
    titles = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_every_error_in_troubleshooting_is_one_of_ours():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").partition("## Errors that are not ours")[0]
    texts = re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)
    ours = [template for path in SOURCE.rglob("*.py") for template in templates(path)]
    assert len(texts) > 50
    for text in texts:
        assert any(template.fullmatch(text) for template in ours), text


def templates(path: Path) -> list[re.Pattern[str]]:
    """Return the texts of a file as patterns, with a gap where an f-string is filled in."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
        words = [str(piece.value) if isinstance(piece, ast.Constant) else None for piece in pieces]
        if len("".join(word for word in words if word)) >= 12:  # so that an f-string of gaps alone does not match everything
            found.append(re.compile("".join(".+" if word is None else re.escape(word) for word in words)))
    return found


def test_the_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {segue.__version__}\n" in citation
    assert segue.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def draw_the_pictures_of_the_guides() -> None:
    os.chdir(ROOT / "docs" / "figures")
    for page in sorted(GUIDES.glob("*.md")):
        if pictures(page) and python_blocks(page):
            run(page)


if __name__ == "__main__":
    draw_the_pictures_of_the_guides()
