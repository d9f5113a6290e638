"""The page of `segue eval`: it fetches nothing, escapes everything, and has figures for light and for dark."""

import base64
import hashlib
import io
import re

from PIL import Image

from segue.convert import evaluate, evaluation_page


def test_the_page_fetches_nothing_and_reads_nothing_as_html(results):
    nasty = "</title><script>alert(1)</script>{{ rows }}"
    changed = {**results, "data": {**results["data"], "name": nasty}, "base": {"name": nasty}}
    page = evaluation_page.page(changed, evaluate.rows(changed), evaluate.sentences(changed), [])
    assert "<script>alert" not in page
    assert page.count("{{ rows }}") == 3  # twice the title, and in a sentence, as text
    assert not re.search(r"(src|href)=.(https?:|//)", page)
    for tag in ("style", "script"):
        content = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in page


def test_figures_come_for_light_and_for_dark(results):
    figure = evaluation_page.figures(results)[0]
    for theme in (evaluation_page.LIGHT, evaluation_page.DARK):
        with Image.open(io.BytesIO(figure.png(theme))) as picture:
            assert "#{:02x}{:02x}{:02x}".format(*picture.convert("RGB").getpixel((2, 2))) == theme.paper
