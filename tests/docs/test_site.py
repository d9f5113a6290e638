"""The documentation site: it builds without a warning, leads nowhere else, and its reference knows every public name."""

import ast
import re
from html import unescape
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from pkgutil import resolve_name
from posixpath import dirname, join, normpath
from statistics import median
from types import ModuleType
from typing import NamedTuple
from urllib.parse import unquote

import pytest
from filelock import FileLock

import segue
from segue import data as sources
from tests.helpers.browser import browser  # noqa: F401
from tests.helpers.processes import run_python

ROOT = Path(__file__).parents[2]
CODE = re.compile(r'<div class="([^"]*\bhighlight\b[^"]*)">(?:<[^>]+>)*?<pre>(.*?)</pre>', re.DOTALL)
FAINT = """() => {  // texts in code whose contrast is below 4.5 (WCAG AA)
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const light = (...colors) => {  // relative luminance of colors painted on each other
    canvas.clearRect(0, 0, 1, 1);
    for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)
      .map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = {};
  for (const text of document.querySelectorAll(".md-typeset code, .md-typeset code *")) {
    if (![...text.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())) continue;
    const below = [];
    for (let at = text; at; at = at.parentElement) below.unshift(getComputedStyle(at).backgroundColor);
    const pair = [light(...below), light(...below, getComputedStyle(text).color)].sort((a, b) => a - b);
    const ratio = (pair[1] + 0.05) / (pair[0] + 0.05);
    if (ratio < 4.5) found[`${text.className} ${text.textContent}`] = ratio;
  }
  return found;
}"""
INTEGRATIONS = sorted((ROOT / "src" / "segue" / "integrations").glob("*.py"))


class Read(HTMLParser):
    """What one page of the site refers to, and what can be referred to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.kinds: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.kinds.add(tag)
        self.ids |= {given["id"]} if "id" in given else set()
        self.links += [given["href"]] if tag == "a" and "href" in given else []
        self.loads += [given[name] for name in ("src", "href") if tag != "a" and name in given]


class Site(NamedTuple):
    folder: Path
    said: str
    pages: dict[str, Read]
    files: set[str]


@pytest.fixture(scope="module")
def site(tmp_path_factory, worker_id) -> Site:
    """Build the site, once for all processes that test."""
    shared = tmp_path_factory.getbasetemp()
    folder = (shared if worker_id == "master" else shared.parent) / "site"
    said = folder.with_suffix(".said")
    with FileLock(folder.with_suffix(".lock")):
        if not said.exists():
            command = ("-m", "mkdocs", "build", "--strict", "--site-dir", folder)
            done = run_python(*command, check=False, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"})
            said.write_text(f"{done.stdout}{done.stderr}exit code {done.returncode}\n", encoding="utf-8")
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    pages = {name: Read((folder / name).read_text(encoding="utf-8")) for name in files if name.endswith(".html")}
    return Site(folder, said.read_text(encoding="utf-8"), pages, files)


@pytest.mark.processes
def test_it_builds_without_a_warning(site):
    """Strict mode covers the navigation too: an entry without a page, and a page without an entry, are warnings."""
    assert site.said.endswith("exit code 0\n"), site.said
    assert "WARNING" not in site.said, site.said
    assert "index.html" in site.files


@pytest.mark.processes
def test_every_link_leads_to_a_page_and_a_place_of_the_site(site):
    for name, page in site.pages.items():
        if name == "404.html":  # stands wherever it was asked for
            continue
        for link in page.links:
            if re.match(r"\w+:", link):
                continue
            path, _, place = unquote(link).partition("#")
            goal = normpath(join(dirname(name), path)) if path else name
            goal = join(goal, "index.html").removeprefix("./") if goal not in site.files else goal
            assert goal in site.files, f"{name}: {link}"
            assert not place or place in site.pages[goal].ids, f"{name}: {link}"


@pytest.mark.processes
def test_nothing_is_fetched_from_elsewhere(site):
    for name, page in site.pages.items():
        assert not [link for link in page.loads if re.match(r"(\w+:)?//", link)], name


@pytest.mark.processes
def test_docstrings_are_shown_as_they_are_meant(site):
    for name, page in site.pages.items():
        if name.startswith("api/"):
            assert "blockquote" not in page.kinds, name  # an example that was not recognised: >>> quotes in Markdown
            assert not page.kinds & {"class", "name", "site", "step"}, name  # <words> that were read as HTML


@pytest.mark.processes
def test_the_reference_names_no_private_base(site):
    for name in site.pages:
        text = (site.folder / name).read_text(encoding="utf-8") if name.startswith("api/") else ""
        bases = re.findall(r"Bases: (.*?)</p>", text, re.DOTALL)
        assert not [base for base in bases if ">_" in base], name


@pytest.mark.processes
def test_the_reference_knows_every_public_name(site):
    known = {place for name, page in site.pages.items() if name.startswith("api/") for place in page.ids}
    shown = [thing for place in known if (thing := named(place)) is not None]
    assert len(shown) > 150
    missing = [name for name, public in public_names().items() if not any(public is thing for thing in shown)]
    assert not missing
    callbacks = [f"segue.integrations.{path.stem}.{name}" for path in INTEGRATIONS for name in classes_in(path)]
    assert "segue.integrations.transformers.HandoverCallback" in callbacks
    assert set(callbacks) <= known


@pytest.mark.processes
def test_code_has_at_most_88_columns_or_wraps(site):
    """All but files of the repository, which are shown as they are."""
    found = 0
    for name in site.pages:
        if not name.startswith("source/"):
            for kind, block in CODE.findall((site.folder / name).read_text(encoding="utf-8")):
                found += 1
                lines = unescape(re.sub(r"<[^>]+>", "", block)).splitlines()
                wraps = "wrapped" in kind or "doc-signature" in kind
                assert wraps or max(map(len, lines), default=0) <= 88, f"{name}: {max(lines, key=len)}"
    assert found > 500


@pytest.mark.browser
@pytest.mark.processes
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["training.html", "cards/local_fit.html", "api/gates.html"])
def test_code_is_readable(site, browser, scheme, name):  # noqa: F811
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto((site.folder / name).as_uri())
    faint = page.evaluate(FAINT)
    context.close()
    assert not faint


@pytest.mark.browser
@pytest.mark.processes
def test_the_last_column_has_room_for_words_on_a_phone(site, browser):  # noqa: F811
    context = browser.new_context(viewport={"width": 390, "height": 800})
    page = context.new_page()
    for name in ("claims.html", "performance.html", "peers.html"):
        page.goto((site.folder / name).as_uri())
        cells = page.locator(".md-typeset table:not([class]) tr > :last-child")
        assert min(cells.evaluate_all("cells => cells.map(cell => cell.offsetWidth)")) >= 190, name
    context.close()


@pytest.mark.browser
@pytest.mark.processes
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_wide_table_shows_that_it_scrolls_and_the_page_does_not(site, browser, scheme):  # noqa: F811
    context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.goto((site.folder / "models.html").as_uri())
    table = page.locator(".md-typeset__scrollwrap").nth(1)
    table.evaluate("box => box.scrollIntoView()")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert table.evaluate("box => box.scrollWidth > box.clientWidth")
    began = right_edge(page, table)
    table.evaluate("box => { box.scrollLeft = box.scrollWidth; }")
    ended = right_edge(page, table)
    context.close()
    assert abs(began - ended) > 20, "the shade at the edge does not go when the end of the table is in sight"


def right_edge(page, table) -> float:
    """Return how bright the table's last column of pixels is, of 255: the median over what is in the middle of the window."""
    images = pytest.importorskip("PIL.Image", reason="this test reads pixels with pillow")
    box = table.bounding_box()
    shot = page.screenshot(clip={"x": box["x"] + box["width"] - 2, "y": 300, "width": 1, "height": 200})
    return median(images.open(BytesIO(shot)).convert("L").tobytes())


def test_the_decision_chart_rests_on_claims_that_are_not_refuted():
    """A claim whose text has changed stops the build of the site; one that new results refute is found here."""
    page = (ROOT / "docs" / "which-method.md").read_text(encoding="utf-8")
    claims = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8").splitlines()
    (asked,) = re.findall(r"<!-- claims: (.+?) -->", page, re.DOTALL)
    beginnings = [" ".join(part.split()) for part in asked.split("|")]
    lines = [line for line in claims for beginning in beginnings if line.startswith(f"| {beginning}")]
    assert len(lines) == len(beginnings) > 5
    assert [line for line in lines if "**refuted" in line] == []


def public_names() -> dict[str, object]:
    """Return what people import: the names of `segue`, and those of the rooms among them."""
    found = {f"segue.{name}": getattr(segue, name) for name in segue.__all__}
    for room in [*(thing for thing in found.values() if isinstance(thing, ModuleType)), sources]:
        listed = getattr(room, "__all__", None) or [*classes_in(Path(room.__file__)), *functions_in(Path(room.__file__))]
        found |= {f"{room.__name__}.{name}": getattr(room, name) for name in listed}
    return {name: thing for name, thing in found.items() if not isinstance(thing, ModuleType)}


def named(place: str) -> object:
    """Return what a dotted name of the reference stands for; nothing for headings and for settings without a default."""
    if not place.startswith("segue.") or place.startswith("segue.integrations."):  # which would import the frameworks
        return None
    try:
        return resolve_name(place)
    except (AttributeError, ImportError):
        return None


def classes_in(path: Path) -> list[str]:
    made = ast.parse(path.read_text(encoding="utf-8")).body
    return [node.name for node in made if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def functions_in(path: Path) -> list[str]:
    """Return functions and annotated names, which are contracts such as `Gate`."""
    made = ast.parse(path.read_text(encoding="utf-8")).body
    names = [node.name for node in made if isinstance(node, ast.FunctionDef)]
    names += [node.target.id for node in made if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return [name for name in names if not name.startswith("_")]
