"""Let the site and the repository share one text: pages link to files of the repository, the site follows.

A file outside `docs/` that a page links to becomes a page of its own below `source/`, so that nothing leads out of the site.
`<!-- README: Install -->` stands for that section of the README, written once; `no-run` is a word to the tests alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
FENCES = r"^ *`````.*?^ *`````|^ *```.*?^ *```"
PARTS = re.compile(rf"({FENCES}|`[^`\n]+`)", re.MULTILINE | re.DOTALL)  # code, in which nothing is a link
LINK = re.compile(r"\]\(([^)\s]+)\)")
SECTION = re.compile(r"<!-- README: (.+?) -->")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file outside `docs/` that a page links to, also from such a file."""
    open_pages = [_origin(file.src_uri) for file in files.documentation_pages()]
    seen: set[str] = set()
    while open_pages:
        origin = open_pages.pop()
        for path in {_target(link, origin) for link in _links(_with_sections(_markdown(origin)))}:
            if path is None or path.startswith("docs/") or path in seen or not (ROOT / path).exists():
                continue
            seen.add(path)
            page = f"---\nsearch:\n  exclude: true\n---\n\n{_markdown(path)}"
            files.append(File.generated(config, _place(path), content=page, inclusion=InclusionLevel.NOT_IN_NAV))
            open_pages.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in sections of the README and point every link at its place in the site."""
    here = page.file.src_uri
    origin = _origin(here)
    pieces = SECTION.split(markdown.replace("```python no-run\n", "```python\n"))  # text, title, text, title, ...
    return "".join(
        _moved(_section(piece), "README.md", here) if index % 2 else _moved(piece, origin, here)
        for index, piece in enumerate(pieces)
    )


def _links(text: str) -> list[str]:
    return [link for piece in PARTS.split(text)[::2] for link in LINK.findall(piece)]


def _moved(text: str, origin: str, here: str) -> str:
    def point(match: re.Match[str]) -> str:
        path = _target(match[1], origin)
        if path is None:
            return match[0]
        _, mark, heading = match[1].partition("#")
        return f"]({relpath(_place(path), dirname(here) or '.')}{mark}{heading})"

    pieces = PARTS.split(text)
    return "".join(piece if index % 2 else LINK.sub(point, piece) for index, piece in enumerate(pieces))


def _target(link: str, origin: str) -> str | None:
    """Return the file in the repository that a link means; none for the web and for headings of the same page."""
    path = link.partition("#")[0]
    return normpath(join(dirname(origin), path)) if path and "://" not in path else None


def _place(path: str) -> str:
    """Return the place of a file of the repository in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def _origin(place: str) -> str:
    """Return the place of a page of the site in the repository."""
    if not place.startswith("source/"):
        return f"docs/{place}"
    path = place.removeprefix("source/")
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def _markdown(path: str) -> str:
    """Return a file of the repository as a page: Markdown as it is, a folder as the list of its files, all else as code."""
    place = ROOT / path
    if place.is_dir():
        names = sorted(file.name for file in place.iterdir() if file.is_file())
        return f"# {path}\n\n" + "".join(f"- [{name}]({place.name}/{name})\n" for name in names)
    text = place.read_text(encoding="utf-8")
    language = "python" if path.endswith(".py") else "text"
    return text if path.endswith(".md") else f"# {path}\n\n`````{language}\n{text}`````\n"


def _with_sections(text: str) -> str:
    return SECTION.sub(lambda match: _section(match[1]), text)


def _section(title: str) -> str:
    """Return a section of the README, with its heading."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"README.md has no section {title!r}.")
    return found[0].replace("<details>", "<details markdown>")
