"""Make a copy of the repository ready to publish: the links of README.md and [project.urls] lead to the repository's page.

python .ci/absolute_links.py https://github.com/OWNER/NAME v0.1.0

Links to files are relative, so that they work in a clone and in a fork; on a package index they lead nowhere. The address is
known where the package is published from, and stands nowhere else.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LINK = re.compile(r"(!?)(\[[^\]]*\])\(([^)\s]+)\)")
PAGES = {"Source": "", "Issues": "/issues", "Changelog": "/blob/HEAD/CHANGELOG.md"}


def absolute(text: str, page: str, version: str) -> str:
    """Point every relative link of a page at the root at this version of the file."""

    def point(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        return f"{picture}{label}({page}/{'raw' if picture else 'blob'}/{version}/{target})"

    return LINK.sub(point, text)


def with_urls(pyproject: str, page: str) -> str:
    """Add the pages of the repository to [project.urls]."""
    lines = "".join(f'{name} = "{page}{path}"\n' for name, path in PAGES.items())
    heading = re.search(r"^\[project\.urls\].*\n", pyproject, re.MULTILINE)
    assert heading is not None
    return pyproject[: heading.end()] + lines + pyproject[heading.end() :]


def main(page: str, version: str, root: Path = Path()) -> None:
    """Change README.md and pyproject.toml of the current folder."""
    readme, pyproject = root / "README.md", root / "pyproject.toml"
    readme.write_text(absolute(readme.read_text(encoding="utf-8"), page, version), encoding="utf-8")
    pyproject.write_text(with_urls(pyproject.read_text(encoding="utf-8"), page), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
