"""The HTML shell that every page shares: one file that works offline, in light and dark, with nothing fetched.

A page is a Jinja template that extends `shell.html` and fills its blocks. Every value is escaped; style and scripts are
those shipped with the package, and the page's security policy allows these alone, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

if TYPE_CHECKING:
    from importlib.abc import Traversable

STYLES, SCRIPTS = ("shell.css",), ("theme.js", "scroll.js")  # of every page; a page's own follow


def page(
    folder: Traversable,
    template: str,
    *,
    styles: Iterable[str] = (),
    scripts: Iterable[str] = (),
    connects: bool = False,
    **values: Any,
) -> str:
    """Render a template of a folder, with the folder's styles and scripts inside; one that connects may ask its own server.

    >>> text = page(files("segue.reporting"), "shell.html", kind="Segue report", title="<b> is escaped")
    >>> "<h1>&lt;b&gt; is escaped</h1>" in text
    True
    """

    def read(name: str) -> str:
        own = folder.joinpath(name)
        return (own if own.is_file() else files("segue.reporting").joinpath(name)).read_text(encoding="utf-8")

    environment = Environment(loader=FunctionLoader(read), autoescape=True, undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    style = "".join(read(name) for name in (*STYLES, *styles))
    code = [read(name) for name in (*SCRIPTS, *scripts)]
    policy = (
        f"default-src 'none'; img-src data:; style-src {_digest(style)}; "
        f"script-src {' '.join(map(_digest, code))}; base-uri 'none'; form-action 'none'"
        + ("; connect-src 'self'" if connects else "")
    )
    return environment.get_template(template).render(
        policy=Markup(policy), style=Markup(style), scripts=[Markup(text) for text in code], **values
    )


def data_uri(png: bytes) -> str:
    """Return a PNG as an address that holds the picture itself."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
