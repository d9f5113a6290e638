"""The page of a comparison: one HTML file that works offline, with its figures for light and for dark inside."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any

from segue.convert import findings
from segue.reporting import html, palette
from segue.reporting.formatting import memory, significant
from segue.reporting.records import write_file
from segue.reporting.statistics import Interval

SIZE = (4.1, 2.9)  # inches
DPI = 180


@dataclass(frozen=True)
class Theme:
    """The colours of a figure besides those of its lines."""

    paper: str
    ink: str
    soft: str
    grid: str
    dark: bool


LIGHT = Theme("#ffffff", "#16191f", "#59616e", "#e8ebf0", False)
DARK = Theme("#181c23", "#e8ebf0", "#a3acb9", "#262c35", True)

Read = Callable[[dict[str, Any]], Interval]  # a value of a row
Style = tuple[tuple[str, str], str, str]  # colours for light and dark, marker, dash
RECALL = {  # titles and captions
    "text": ("Copied text", "Held-out text, then the same again: how much less does a token surprise the second time?"),
    "words": ("Copied words", "Random words, then the same again: how much less does a word surprise the second time?"),
    "associative": (
        "Associative recall",
        "Pairs of words, ordinary text, then the first words of the pairs in another order: which word followed?",
    ),
    "retrieval": ("Key-value retrieval", "Lines of a key and a value, then some of the keys again: which value?"),
}
STYLES: dict[str, Style] = {"original": (palette.GREY, "s", "--"), "converted": (palette.BLUE, "o", "-")}


@dataclass(frozen=True)
class Figure:
    """One figure: its file name, title and caption, and a function that draws it on axes."""

    name: str
    title: str
    caption: str
    fill: Callable[[Any, Theme], None]

    def png(self, theme: Theme) -> bytes:
        """Draw the figure."""
        import matplotlib
        from matplotlib.figure import Figure as Sheet

        with warnings.catch_warnings(), matplotlib.rc_context():
            warnings.filterwarnings("ignore", message=".*[Gg]lyph")  # a label may have letters that the font lacks
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(_settings(theme))
            sheet = Sheet(figsize=SIZE, layout="constrained")
            self.fill(sheet.subplots(), theme)
            out = BytesIO()
            sheet.savefig(out, dpi=DPI, metadata={"Software": None})
        return out.getvalue()


Drawn = tuple[Figure, bytes, bytes]  # for light and for dark


def write(results: dict[str, Any], out: Path) -> Path:
    """Write the figures as PNG files, and index.html."""
    drawn = [(figure, figure.png(LIGHT), figure.png(DARK)) for figure in figures(results)]
    text = page(results, drawn)
    for figure, light, _ in drawn:
        write_file(light, out / f"{figure.name}.png")
    return write_file(text, out / "index.html")


def page(results: dict[str, Any], drawn: Sequence[Drawn]) -> str:
    """Render the page with style, script and pictures inside; values of the results are escaped."""
    return html.page(
        files("segue.convert"),
        "evaluation_page.html",
        styles=["evaluation_page.css"],
        kind="Segue: converted and original model",
        title=f"{Path(results['folder']).resolve().name} compared with {Path(results['base']['name']).name}",
        worse=findings.worse(results),
        sentences=findings.sentences(results),
        parts=[(part, list(rows)) for part, rows in groupby(findings.rows(results), lambda row: row.part)],
        headings=findings.Row._fields[1:4],
        branches=findings.branch_rows(results),
        branch_headings=findings.BRANCH_HEADINGS[1:],
        branch_texts=results["branches"][0]["texts"] if results.get("branches") else 0,
        greedy=results.get("greedy", {}),
        figures=[(figure, html.data_uri(light), html.data_uri(dark)) for figure, light, dark in drawn],
        versions=", ".join(f"{name} {version}" for name, version in results["meta"]["versions"].items()),
        finished=results["meta"]["finished"],
    )


def figures(results: dict[str, Any]) -> list[Figure]:
    """Return the figures for a kind of model."""
    if results["kind"] == "causal":
        return [*_positions(results), _greedy(results), *_recall(results.get("recall", {})), *_decoding(results)]
    if results["kind"] == "encoder":
        return [*_embeddings(results), _reading(results)]
    return [_confidence(results), _reading(results)]


def _positions(results: dict[str, Any]) -> list[Figure]:
    bins, trained = results["positions"], results["data"]["trained_tokens"]
    x, last = [(one["from"] * one["to"]) ** 0.5 for one in bins], bins[-1]["to"]

    def figure(name: str, title: str, y_label: str, lines: dict[str, list[Interval]], note: str = "") -> Figure:
        def fill(axes: Any, theme: Theme) -> None:
            for model, found in lines.items():
                _line(axes, theme, STYLES[model], x, found, model if len(lines) > 1 else "")
            if name == "perplexity":
                _logarithmic(axes)
                axes.legend()
            elif name == "perplexity_ratio":
                axes.axhline(1, color=theme.soft, linewidth=1, linestyle="--")
            elif name == "kl":
                axes.set_ylim(bottom=0)
            _doublings(axes, [2**i for i in range(last.bit_length())])
            axes.set(xlabel="tokens before the predicted one", ylabel=y_label)
            if trained < last:
                axes.axvline(trained, color=theme.soft, linewidth=1, linestyle=":")

        return Figure(name, f"{title} by position", f"{note}{bands}", fill)

    bands = f"Bands: 95 % intervals over {results['examples']['count']} {results['examples']['what']}, by Student's t."
    if trained < last:
        bands += f" Dotted line: {trained} tokens, the length of the pieces in training."
    perplexity = {name: [one["perplexity"][name] for one in bins] for name in STYLES}
    ratio = {"converted": [one["perplexity_ratio"] for one in bins]}
    same = {"converted": [_percent(one["same_first_choice"]) for one in bins]}
    kl = {"converted": [one["kl"] for one in bins]}
    both = "Both models read the same text. "
    return [
        figure("perplexity", "Perplexity", "perplexity", perplexity),
        figure("perplexity_ratio", "Ratio of the perplexities", "converted / original", ratio, "Computed text by text. "),
        figure("same_choice", "Same first choice", "same first choice (%)", same, both),
        figure("kl", "Divergence", "KL(original || converted), nats", kl, both),
    ]


def _greedy(results: dict[str, Any]) -> Figure:
    greedy = results["greedy"]
    x = list(range(1, greedy["new_tokens"] + 1))

    def fill(axes: Any, theme: Theme) -> None:
        prefix, token = ([_percent(one) for one in greedy[key]] for key in ("equal_prefix", "equal"))
        _line(axes, theme, STYLES["converted"], x, prefix, "all tokens so far")
        _line(axes, theme, (palette.ORANGE, "", "-"), x, token, "this token")
        axes.set(xlabel="new token", ylabel="equal continuations (%)", ylim=(-3, 103))
        axes.legend()

    caption = (
        f"{greedy['prompts']} prompts of {greedy['prompt_tokens']} held-out tokens, continued greedily by each model: after "
        "the first difference the two read different texts. Bands: 95 % intervals over prompts, by Wilson."
    )
    return Figure("greedy", "Greedy continuations", caption, fill)


def _recall(recall: dict[str, Any]) -> list[Figure]:
    def figure(name: str, kind: dict[str, Any]) -> Figure:
        chance = kind["chance"]

        def fill(axes: Any, theme: Theme) -> None:
            x = [row["distance"] for row in kind["rows"]]
            for side, style in STYLES.items():
                found = [row["gain"][side] if chance is None else _percent(row["accuracy"][side]) for row in kind["rows"]]
                _line(axes, theme, style, x, found, side)
            level = 0 if chance is None else 100 * chance
            axes.axhline(level, color=theme.soft, linewidth=1, linestyle=":", label=None if chance is None else "chance")
            _doublings(axes, x)
            axes.set(xlabel="tokens back", ylabel="gain, nats" if chance is None else "right answers (%)")
            axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
            axes.legend()

        title, caption = RECALL[name]
        bands = f"At least {kind['sequences']} sequences; bands: 95 % intervals over them."
        return Figure(f"recall_{name}", title, f"{caption} {bands}", fill)

    return [figure(name, kind) for name, kind in recall.items()]


def _decoding(results: dict[str, Any]) -> list[Figure]:
    def figure(name: str, title: str, caption: str, y_label: str, read: Read, finish: Callable[[Any], None]) -> Figure:
        def fill(axes: Any, theme: Theme) -> None:
            _against_context(axes, theme, results["speed"], y_label, read)
            finish(axes)

        return Figure(name, title, caption, fill)

    random = "One sequence of random tokens, the models in turn."
    timed = f"{random} Medians over {results['timed_steps']} tokens; bands: quartiles."
    once = f"{random} Measured once."
    cache = "Exact: bytes of the cache after the context. A flat line is constant memory."
    peak = "Counted: tensors alive at the same time besides the weights, without memory inside an operator."
    return [
        figure("tokens_per_second", "Generating", timed, "tokens per second", _timed, _from_zero),
        figure("seconds_to_read", "Reading the context", once, "seconds", _exact("seconds_to_read"), _logarithmic),
        figure("cache", "Cache of one sequence", cache, "", _exact("cache_bytes"), _bytes),
        figure("peak", "Peak memory besides the weights", peak, "", _exact("peak_bytes"), _bytes),
    ]


def _reading(results: dict[str, Any]) -> Figure:
    images = results["images"]

    def fill(axes: Any, theme: Theme) -> None:
        _against_context(axes, theme, results["speed"], "images per second" if images else "tokens per second", _timed)
        axes.set_xlabel("images at once" if images else "tokens of the text")
        _from_zero(axes)

    what = "Images" if images else "One text of random tokens"
    caption = f"{what}, the models in turn. Medians over {results['timed_steps']} passes; bands: quartiles."
    return Figure("tokens_per_second", "Reading", caption, fill)


def _confidence(results: dict[str, Any]) -> Figure:
    rows = results["by_confidence"]

    def fill(axes: Any, theme: Theme) -> None:
        found = [_percent(row["same_first_choice"]) for row in rows]
        means = [one["mean"] for one in found]
        errors = [[one["mean"] - one["low"] for one in found], [one["high"] - one["mean"] for one in found]]
        names = [f"{row['from']:g} to {row['to']:g}\nn = {one['n']:,}" for row, one in zip(rows, found, strict=True)]
        axes.bar(names, means, 0.6, color=palette.BLUE[theme.dark], yerr=errors, ecolor=theme.ink, capsize=3)
        axes.grid(visible=False, axis="x")
        axes.tick_params(axis="x", labelsize=7.5, length=0)
        axes.set(xlabel="the original's probability for its choice", ylabel="same choice (%)", ylim=(0, 103))

    caption = "How often both models choose the same, by the confidence of the original. Bars: 95 % intervals, by Wilson."
    return Figure("same_choice", "Same choice", caption, fill)


def _embeddings(results: dict[str, Any]) -> list[Figure]:
    cosines, lengths, examples = results["cosines"], results["lengths"], results["examples"]
    others = results["cosine_between_examples"]

    def by_length(axes: Any, theme: Theme) -> None:
        axes.plot(lengths, cosines, ".", color=theme.soft, alpha=0.5, markersize=4, markeredgewidth=0)
        groups = results["by_length"]
        x = [(one["from"] * one["to"]) ** 0.5 for one in groups]
        _line(axes, theme, STYLES["converted"], x, [one["cosine"] for one in groups])
        _doublings(axes, [2**i for i in range(1, max(lengths).bit_length() + 1)])
        axes.set_xlim(min(lengths) / 1.15, max(lengths) * 1.15)
        axes.set(xlabel="tokens of the text", ylabel="cosine to the original's embedding")
        axes.set_ylim(top=min(axes.get_ylim()[1], 1.005))

    def distribution(axes: Any, theme: Theme) -> None:
        ordered = sorted(cosines)
        axes.plot(ordered, [100 * (i + 1) / len(ordered) for i in range(len(ordered))], color=palette.BLUE[theme.dark])
        axes.axvline(others, color=theme.soft, linewidth=1, linestyle=":")
        text, place = f" two different {examples['what']}\n by the original", ("data", "axes fraction")
        axes.annotate(text, (others, 0.98), xycoords=place, va="top", color=theme.soft, fontsize=7.5)
        axes.set(xlabel="cosine to the original's embedding", ylabel=f"{examples['what']} with at most this (%)", ylim=(0, 101))

    groups = "Dots: texts. Line: means of groups of texts of similar length, with 95 % intervals by Student's t."
    caption = f"{examples['count']} {examples['what']}. Dotted line: mean cosine of two different ones, both by the original."
    drawn = [Figure("cosine_by_length", "Embeddings by length", groups, by_length)] if lengths else []
    return [*drawn, Figure("cosine", "Embeddings", caption, distribution)]


def _against_context(axes: Any, theme: Theme, rows: list[dict[str, Any]], y_label: str, read: Read) -> None:
    for name, style in STYLES.items():
        own = [row for row in rows if row["model"] == name]
        _line(axes, theme, style, [row["context"] for row in own], [read(row) for row in own], name)
    _doublings(axes, sorted({row["context"] for row in rows}))
    axes.set(xlabel="tokens of context", ylabel=y_label)
    axes.legend()


def _line(axes: Any, theme: Theme, style: Style, x: Sequence[float], found: list[Interval], label: str = "") -> None:
    colours, marker, dash = style
    how = {"color": colours[theme.dark], "linestyle": dash, "marker": marker if len(x) <= 24 else "", "label": label or None}
    axes.plot(x, [one["mean"] for one in found], **how)
    banded = [(place, one["low"], one["high"]) for place, one in zip(x, found, strict=True) if one["low"] is not None]
    if banded:
        axes.fill_between(*zip(*banded, strict=True), color=colours[theme.dark], alpha=0.18, linewidth=0)


def _doublings(axes: Any, ticks: list[int]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _logarithmic(axes: Any) -> None:
    """Use a logarithmic axis with plain numbers."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(MaxNLocator(6) if high < 5 * low else LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: significant(value))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _bytes(axes: Any) -> None:
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: memory(value))


def _from_zero(axes: Any) -> None:
    """Start the axis at 0, and cut bands that a busy machine made very wide."""
    highest = max(value for line in axes.get_lines() for value in line.get_ydata())
    axes.set_ylim(0, min(axes.get_ylim()[1], 1.6 * highest))


def _timed(row: dict[str, Any]) -> Interval:
    low, high = row["quartiles"]
    return {"mean": row["tokens_per_second"], "low": low, "high": high}


def _exact(key: str) -> Read:
    return lambda row: {"mean": row[key], "low": None, "high": None}


def _percent(found: Interval) -> Interval:
    return {key: value if key == "n" or value is None else 100 * value for key, value in found.items()}


def _settings(theme: Theme) -> Any:
    colours = {
        theme.paper: ("figure.facecolor", "axes.facecolor"),
        theme.ink: ("axes.labelcolor", "text.color"),
        theme.soft: ("axes.edgecolor", "xtick.color", "ytick.color"),
        theme.grid: ("grid.color",),
    }
    return {name: colour for colour, names in colours.items() for name in names} | {
        "font.size": 9,
        "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "lines.markersize": 4,
        "text.parse_math": False,
    }
