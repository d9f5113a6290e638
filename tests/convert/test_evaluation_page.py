"""The page of `segue eval`: it fetches nothing, escapes everything, and has figures for light and for dark."""

import base64
import hashlib
import html
import io
import re

from PIL import Image

from segue.convert import evaluation_page, findings

INTERVAL = {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 2}


def test_the_page_fetches_nothing_and_reads_nothing_as_html(results):
    nasty = "</title><script>alert(1)</script>{{ rows }}"
    sample = dict.fromkeys(("prompt", "equal", "original", "converted", "equal_tokens"), nasty)
    texts = {
        "data": {**results["data"], "name": nasty},
        "base": {"name": nasty},
        "greedy": {**results["greedy"], "samples": [sample]},
    }
    page = evaluation_page.page({**results, **texts}, [])
    assert "<script>alert" not in page
    assert page.count("{{ rows }}") == 3 + 6  # twice the title, in a sentence, and in a sample, as text
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


def test_the_page_shows_continuations_and_branches_and_what_is_worse(results):
    row = {
        "perplexity": INTERVAL,
        "kl": INTERVAL,
        "same_first_choice": INTERVAL,
        "loss": {"text": INTERVAL, "associative": INTERVAL},
    }
    branches = [{"without": name, "texts": 2, **row} for name in (None, "far")]
    worse = {**results, "perplexity_ratio": {"mean": 2.0, "low": 1.5, "high": 2.5, "n": 4}, "branches": branches}
    page = evaluation_page.page(worse, [])
    assert "perplexity (2.000 times)" in findings.worse(worse)
    assert '<span class="mark">worse</span>' in page
    assert "without far" in page
    for sample in results["greedy"]["samples"]:
        assert html.escape(sample["prompt"]) in page


def test_results_of_an_earlier_version_are_shown(results):
    """Format 2 had no recall, no branches, and less about generation."""
    kept = (
        "prompts",
        "prompt_tokens",
        "new_tokens",
        "equal",
        "equal_prefix",
        "equal_tokens",
        "equal_prefix_tokens",
        "cache_agreement",
    )
    greedy = {name: results["greedy"][name] for name in kept}
    old = {name: value for name, value in results.items() if name not in ("recall", "branches")} | {
        "accuracy": {side: results["accuracy"][side] for side in ("original", "converted")},
        "greedy": greedy,
        "format": 2,
    }
    assert "equal beginning" in evaluation_page.page(old, [])
    assert len(evaluation_page.figures(old)) == 9
