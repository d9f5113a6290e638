"""Figures of a comparison, one pair of axes each, on light and on dark paper."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from segue.reporting import palette
from segue.reporting.formatting import memory, significant
from segue.reporting.statistics import Interval

SIZE = (4.1, 2.9)  # inches
DPI = 180
MODELS = ("original", "converted")


@dataclass(frozen=True)
class Paper:
    """What a figure is drawn on."""

    paper: str
    ink: str
    soft: str
    grid: str
    dark: bool

    def colour(self, pair: tuple[str, str]) -> str:
        """Choose a colour of the palette."""
        return pair[self.dark]


LIGHT = Paper("#ffffff", "#16191f", "#59616e", "#e8ebf0", False)
DARK = Paper("#181c23", "#e8ebf0", "#a3acb9", "#262c35", True)

LOOKS: dict[str, tuple[tuple[str, str], str, str]] = {
    "original": (palette.GREY, "s", "--"),
    "converted": (palette.BLUE, "o", "-"),
}


@dataclass(frozen=True)
class Figure:
    """One figure: its file name, what it shows, and how it is drawn on axes."""

    name: str
    title: str
    caption: str
    fill: Callable[[Any, Paper], None]

    def png(self, paper: Paper) -> bytes:
        """Draw it."""
        import matplotlib
        from matplotlib.figure import Figure as Sheet

        with warnings.catch_warnings(), matplotlib.rc_context():
            warnings.filterwarnings("ignore", message=".*[Gg]lyph")  # a label may hold letters that the font lacks
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(_settings(paper))
            sheet = Sheet(figsize=SIZE, layout="constrained")
            self.fill(sheet.subplots(), paper)
            out = BytesIO()
            sheet.savefig(out, dpi=DPI, metadata={"Software": None})
        return out.getvalue()


def figures(results: dict[str, Any]) -> list[Figure]:
    """Lay out the figures that these results give."""
    if results["kind"] == "causal":
        return [*_positions(results), _greedy(results), *_decoding(results)]
    if results["kind"] == "encoder":
        return [*_embeddings(results), _reading(results)]
    return [_sureness(results), _reading(results)]


def _positions(results: dict[str, Any]) -> list[Figure]:
    bins, data = results["positions"], results["data"]
    x = [(one["from"] * one["to"]) ** 0.5 for one in bins]
    last = bins[-1]["to"]

    def perplexity(axes: Any, paper: Paper) -> None:
        for name in MODELS:
            _line(axes, paper, LOOKS[name], x, [one["perplexity"][name] for one in bins], name)
        axes.set_yscale("log")
        axes.set_ylabel("perplexity")
        _plain(axes)
        axes.legend()
        position(axes, paper)

    def ratio(axes: Any, paper: Paper) -> None:
        axes.axhline(1, color=paper.soft, linewidth=1, linestyle="--")
        _line(axes, paper, LOOKS["converted"], x, [one["perplexity_ratio"] for one in bins])
        axes.set_ylabel("perplexity, converted / original")
        position(axes, paper)

    def same(axes: Any, paper: Paper) -> None:
        _line(axes, paper, LOOKS["converted"], x, [_percent(one["same_first_choice"]) for one in bins])
        axes.set_ylabel("same first choice (%)")
        position(axes, paper)

    def kl(axes: Any, paper: Paper) -> None:
        _line(axes, paper, LOOKS["converted"], x, [one["kl"] for one in bins])
        axes.set_ylabel("KL(original || converted), nats")
        axes.set_ylim(bottom=0)
        position(axes, paper)

    def position(axes: Any, paper: Paper) -> None:
        _doublings(axes, [2**i for i in range(last.bit_length())])
        axes.set_xlabel("tokens read before the predicted one")
        if data["trained_tokens"] < last:
            axes.axvline(data["trained_tokens"], color=paper.soft, linewidth=1, linestyle=":")

    over = f"Bands: 95 % intervals over {results['examples']['count']} {results['examples']['what']}, by Student's t."
    if data["trained_tokens"] < last:
        over += f" Dotted: {data['trained_tokens']} tokens, the length of the pieces that the conversion trained on."
    return [
        Figure("perplexity", "Perplexity by position", over, perplexity),
        Figure("perplexity_ratio", "Ratio of the perplexities by position", f"Text by text. {over}", ratio),
        Figure("same_choice", "Same first choice by position", f"Both read the same text. {over}", same),
        Figure("kl", "Divergence by position", f"Both read the same text. {over}", kl),
    ]


def _greedy(results: dict[str, Any]) -> Figure:
    greedy = results["greedy"]
    x = list(range(1, greedy["new_tokens"] + 1))

    def fill(axes: Any, paper: Paper) -> None:
        _line(axes, paper, LOOKS["converted"], x, [_percent(one) for one in greedy["equal_so_far"]], "all tokens up to here")
        look = (palette.ORANGE, "", "-")
        _line(axes, paper, look, x, [_percent(one) for one in greedy["equal"]], "this token")
        axes.set(xlabel="new token", ylabel="continuations that are equal (%)", ylim=(-3, 103))
        axes.legend()

    caption = (
        f"{greedy['prompts']} prompts of {greedy['prompt_tokens']} held-out tokens, each model goes on by its own likeliest "
        "tokens: after the first difference the two read different texts. Bands: 95 % intervals over prompts, by Wilson."
    )
    return Figure("greedy", "Greedy continuations", caption, fill)


def _decoding(results: dict[str, Any]) -> list[Figure]:
    rows = results["speed"]

    def rate(axes: Any, paper: Paper) -> None:
        _against_context(axes, paper, rows, "tokens per second", _timed)
        _from_zero(axes)

    def seconds(axes: Any, paper: Paper) -> None:
        _against_context(axes, paper, rows, "seconds", lambda row: _bare(row["seconds_to_read"]))
        axes.set_yscale("log")
        _plain(axes)

    def size(key: str) -> Callable[[Any, Paper], None]:
        def fill(axes: Any, paper: Paper) -> None:
            _against_context(axes, paper, rows, "", lambda row: _bare(row[key]))
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda value, _: memory(value))

        return fill

    random = "One sequence of random tokens, the models in turn."
    timed = f"{random} Medians over {results['timed_steps']} tokens, bands: the middle half."
    cache = "Exact: the bytes that the cache holds on to after the context. A flat line is constant memory."
    peak = "Counted: tensors alive at once beside the weights, reading the context; not what an operator uses inside itself."
    return [
        Figure("tokens_per_second", "Generating", timed, rate),
        Figure("seconds_to_read", "Reading the context", f"{random} Measured once.", seconds),
        Figure("cache", "Cache of one sequence", cache, size("cache_bytes")),
        Figure("peak", "Peak memory beside the weights", peak, size("peak_bytes")),
    ]


def _reading(results: dict[str, Any]) -> Figure:
    images = results["images"]

    def fill(axes: Any, paper: Paper) -> None:
        _against_context(axes, paper, results["speed"], "images per second" if images else "tokens per second", _timed)
        axes.set_xlabel("images at once" if images else "tokens of the text")
        _from_zero(axes)

    what = "Images" if images else "One text of random tokens"
    caption = (
        f"{what}, read as a whole, the models in turn. Medians over {results['timed_steps']} rounds, bands: the middle half."
    )
    return Figure("tokens_per_second", "Reading", caption, fill)


def _sureness(results: dict[str, Any]) -> Figure:
    rows = results["sureness"]

    def fill(axes: Any, paper: Paper) -> None:
        found = [_percent(row["same_first_choice"]) for row in rows]
        means = [one["mean"] for one in found]
        errors = [[m - one["low"] for m, one in zip(means, found, strict=True)], [one["high"] - one["mean"] for one in found]]
        names = [f"{row['from']:g} to {row['to']:g}\nn = {one['n']:,}" for row, one in zip(rows, found, strict=True)]
        axes.bar(names, means, 0.6, color=paper.colour(palette.BLUE), yerr=errors, ecolor=paper.ink, capsize=3)
        axes.grid(visible=False, axis="x")
        axes.tick_params(axis="x", labelsize=7.5, length=0)
        axes.set(xlabel="the original's probability for its choice", ylabel="same choice (%)", ylim=(0, 103))

    caption = "How often the converted model chooses the same, by how sure the original is. Bars: 95 % intervals, by Wilson."
    return Figure("same_choice", "Same choice", caption, fill)


def _embeddings(results: dict[str, Any]) -> list[Figure]:
    cosines, count = results["cosines"], results["examples"]

    def by_length(axes: Any, paper: Paper) -> None:
        axes.plot(results["lengths"], cosines, ".", color=paper.soft, alpha=0.5, markersize=4, markeredgewidth=0)
        groups = results["by_length"]
        x = [(one["from"] * one["to"]) ** 0.5 for one in groups]
        _line(axes, paper, LOOKS["converted"], x, [one["cosine"] for one in groups])
        longest = max(results["lengths"])
        _doublings(axes, [2**i for i in range(1, longest.bit_length() + 1)])
        axes.set_xlim(min(results["lengths"]) / 1.15, longest * 1.15)
        axes.set(xlabel="tokens of the text", ylabel="cosine to the original's embedding")
        axes.set_ylim(top=min(axes.get_ylim()[1], 1.005))

    def spread(axes: Any, paper: Paper) -> None:
        ordered = sorted(cosines)
        axes.plot(ordered, [100 * (i + 1) / len(ordered) for i in range(len(ordered))], color=paper.colour(palette.BLUE))
        axes.axvline(results["cosine_of_strangers"], color=paper.soft, linewidth=1, linestyle=":")
        axes.annotate(
            f" two different {count['what']}\n by the original", (results["cosine_of_strangers"], 0.98),
            xycoords=("data", "axes fraction"), va="top", color=paper.soft, fontsize=7.5,
        )  # fmt: skip
        axes.set(xlabel="cosine to the original's embedding", ylabel=f"{count['what']} with at most this (%)", ylim=(0, 101))

    lengths = (
        "Dots: texts. Line: means of groups of texts of similar length, with 95 % intervals by Student's t."
        if results["lengths"]
        else ""
    )
    drawn = [Figure("cosine_by_length", "Embeddings by length", lengths, by_length)] if results["lengths"] else []
    caption = f"{count['count']} {count['what']}. Dotted: the mean cosine of two different ones, both by the original."
    return [*drawn, Figure("cosine", "Embeddings", caption, spread)]


def _against_context(
    axes: Any, paper: Paper, rows: list[dict[str, Any]], y_label: str, read: Callable[[dict[str, Any]], Interval]
) -> None:
    for name in MODELS:
        mine = [row for row in rows if row["model"] == name]
        _line(axes, paper, LOOKS[name], [row["context"] for row in mine], [read(row) for row in mine], name)
    _doublings(axes, sorted({row["context"] for row in rows}))
    axes.set(xlabel="tokens of context", ylabel=y_label)
    axes.legend()


def _line(
    axes: Any, paper: Paper, look: tuple[tuple[str, str], str, str], x: Sequence[float], found: list[Interval], label: str = ""
) -> None:
    pair, marker, dash = look
    colour = paper.colour(pair)
    axes.plot(
        x,
        [one["mean"] for one in found],
        color=colour,
        linestyle=dash,
        marker=marker if len(x) <= 24 else "",
        label=label or None,
    )
    banded = [(place, one["low"], one["high"]) for place, one in zip(x, found, strict=True) if one["low"] is not None]
    if banded:
        axes.fill_between(*zip(*banded, strict=True), color=colour, alpha=0.18, linewidth=0)


def _doublings(axes: Any, ticks: list[int]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _plain(axes: Any) -> None:
    """Write numbers on a logarithmic axis as people do."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(MaxNLocator(6) if high < 5 * low else LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: significant(value))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _from_zero(axes: Any) -> None:
    """Show the lines from 0 upwards; where a busy machine made a band very wide, not all of it."""
    highest = max(value for line in axes.get_lines() for value in line.get_ydata())
    axes.set_ylim(0, min(axes.get_ylim()[1], 1.6 * highest))


def _timed(row: dict[str, Any]) -> Interval:
    low, high = row["middle_half"]
    return {"mean": row["tokens_per_second"], "low": low, "high": high}


def _bare(value: float) -> Interval:
    return {"mean": value, "low": None, "high": None}


def _percent(found: Interval) -> Interval:
    return {key: value if key == "n" or value is None else 100 * value for key, value in found.items()}


def _settings(paper: Paper) -> Any:
    return {
        "font.size": 9,
        "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
        "figure.facecolor": paper.paper,
        "axes.facecolor": paper.paper,
        "axes.edgecolor": paper.soft,
        "axes.labelcolor": paper.ink,
        "text.color": paper.ink,
        "xtick.color": paper.soft,
        "ytick.color": paper.soft,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": paper.grid,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "lines.markersize": 4,
        "text.parse_math": False,
    }
