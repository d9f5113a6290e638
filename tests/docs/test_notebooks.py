"""The guides as notebooks: the same text, and every cell runs, in one kernel for all of them."""

from __future__ import annotations

import sys

import pytest

from tests.docs.test_pages import GUIDES, ROOT, pictures, python_blocks

sys.path.insert(0, str(ROOT / "docs" / "tools"))
import notebooks

NAMES = [guide.stem for guide in notebooks.GUIDES]
BETWEEN = """
get_ipython().reset(new_session=False)
import os
os.chdir({folder!r})
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing waits for a network
"""


@pytest.fixture(scope="module")
def kernel():
    """One process for all notebooks: torch and transformers are imported once."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", extra_arguments=["--HistoryManager.enabled=False"])
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_what_its_guide_says(name):
    """`python docs/tools/notebooks.py` writes them again."""
    saved = (notebooks.NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")
    assert saved == notebooks.written(GUIDES / f"{name}.md")
    assert [path.stem for path in sorted(notebooks.NOTEBOOKS.glob("*.ipynb"))] == NAMES


def test_every_block_of_a_guide_is_a_cell_and_the_first_cell_installs():
    for guide in notebooks.GUIDES:
        first, *cells = [cell.source for cell in notebooks.notebook(guide).cells if cell.cell_type == "code"]
        assert first.count("%pip install -q") == 1
        assert "find_spec" in first
        assert [cell.partition("\n\nfrom IPython.display")[0] for cell in cells] == [
            block.code.strip() for block in python_blocks(guide)
        ]


def test_a_notebook_does_not_repeat_what_its_cells_print():
    made = {guide.stem: notebooks.notebook(guide) for guide in notebooks.GUIDES}
    texts = [cell.source for book in made.values() for cell in book.cells if cell.cell_type == "markdown"]
    printed = [block.printed.strip() for guide in notebooks.GUIDES for block in python_blocks(guide) if block.printed]
    assert printed
    assert [one for one in printed if any(one in text for text in texts)] == []
    assert sum("```" in text for text in texts) == 1  # the formula of guide 4


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name, kernel, tmp_path):
    from nbclient import NotebookClient

    manager, client = kernel
    guide = GUIDES / f"{name}.md"
    client.execute_interactive(BETWEEN.format(folder=str(tmp_path)), output_hook=lambda _: None)
    running = NotebookClient(notebooks.notebook(guide), km=manager, timeout=300)
    running.kc = client
    made = running.execute(reset_kc=False)
    said = [
        "".join(out.text for out in cell.outputs if out.get("name") == "stdout") for cell in made.cells[1:] if "outputs" in cell
    ]
    blocks = python_blocks(guide)
    assert len(said) == len(blocks)
    assert [text for text, block in zip(said, blocks, strict=True) if block.printed not in (None, text)] == []
    assert {path.name for path in tmp_path.glob("*.png")} == pictures(guide)
    shown = [out for cell in made.cells for out in cell.get("outputs", ()) if "image/png" in out.get("data", {})]
    assert len(shown) >= len(pictures(guide))  # the reader sees them, wherever the notebook is opened
