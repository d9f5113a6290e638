"""The report: how well each planner's ranking agrees with the truth, and what its choice at each size loses."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import combinations
from pathlib import Path
from statistics import mean, variance
from typing import Any

from scipy.stats import spearmanr

from experiments.planner.planners import RANDOM, Subset, random_scores

OURS = "segue plan"
Z = 1.645  # nine cases of ten
NAMES = {"kl": "KL", "loss": "loss"}

Truth = dict[Subset, float]


def read(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a file; one that was cut off is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def truths(folder: Path, study: str, measure: str) -> list[Truth]:
    """Return what each subset costs after training, for each seed; a later seed counts when all of its trainings are there."""
    found: dict[int, Truth] = {}
    for line in read(folder / f"{study}_truth.jsonl"):
        if line["subset"]:
            found.setdefault(line["seed"], {})[tuple(line["subset"])] = line[measure]
    return [found[seed] for seed in sorted(found) if len(found[seed]) == len(found[0])]


def noise(seeds: list[Truth]) -> dict[int, float] | None:
    """Return the standard deviation of one training between seeds, for each size; None with one seed."""
    if len(seeds) < 2:
        return None
    squares: dict[int, list[float]] = {}
    for a, b in combinations(seeds, 2):
        for subset in a:
            squares.setdefault(len(subset), []).append((a[subset] - b[subset]) ** 2 / 2)
    return {size: math.sqrt(mean(values)) for size, values in squares.items()}


def averaged(seeds: list[Truth]) -> Truth:
    """Return the mean over seeds."""
    return {subset: mean(one[subset] for one in seeds) for subset in seeds[0]}


def choices(scores: Truth, known: Truth) -> dict[int, dict[Subset, float]]:
    """Return what a planner chooses at each size that leaves a choice; equally good subsets share it."""
    found = {}
    for size in sorted({len(subset) for subset in known}):
        here = [subset for subset in known if len(subset) == size]
        least = min(scores[subset] for subset in here)
        chosen = [subset for subset in here if scores[subset] <= least + 1e-9 * abs(least)]
        if len(here) > 1:
            found[size] = dict.fromkeys(chosen, 1 / len(chosen))
    return found


def correlation(scores: Truth, known: Truth) -> tuple[float, float]:
    """Return Spearman's correlation over all subsets, and its mean within a size."""
    within = []
    for size in sorted({len(subset) for subset in known}):
        here = [subset for subset in known if len(subset) == size]
        if len(here) > 2:
            within.append(_spearman([scores[s] for s in here], [known[s] for s in here]))
    return _spearman([scores[s] for s in known], [known[s] for s in known]), mean(within) if within else math.nan


def _spearman(a: list[float], b: list[float]) -> float:
    return 0.0 if len(set(a)) < 2 else float(spearmanr(a, b).statistic)  # who does not distinguish knows nothing


def compare(folder: Path, study: str, measure: str) -> list[dict[str, Any]]:
    """Return a row for each planner, the mean over the seeds of its ranking, the smallest regret first."""
    seeds = truths(folder, study, measure)
    known, spread = averaged(seeds), noise(seeds)
    several: dict[str, list[dict[str, Any]]] = {}
    for line in read(folder / f"{study}_ranks.jsonl"):
        for name, found in line["rankings"].items():
            scores = {tuple(map(int, key.split())): value for key, value in found["scores"].items()}
            several.setdefault(name, []).append({**found, "scores": scores})
    count = max(map(len, known))
    free = {"inputs": 0.0, "flops": 0.0}
    several["random"] = [{"scores": random_scores(count, seed), **free} for seed in range(RANDOM)]
    rows = []
    for name, rankings in several.items():
        chosen: dict[int, Counter[Subset]] = {}
        for ranking in rankings:
            for size, here in choices(ranking["scores"], known).items():
                for subset, share in here.items():
                    chosen.setdefault(size, Counter())[subset] += share / len(rankings)
        least = {size: min(known[s] for s in known if len(s) == size) for size in chosen}
        each = [mean_regret(choices(ranking["scores"], known), known, least) for ranking in rankings]
        regret = {size: sum(share * known[s] for s, share in here.items()) - least[size] for size, here in chosen.items()}
        agreement = [correlation(ranking["scores"], known) for ranking in rankings]
        rows.append(
            {
                "planner": name,
                "spearman": mean(a for a, _ in agreement),
                "within": mean(b for _, b in agreement),
                "chosen": chosen,
                "regret": regret,
                "mean regret": mean(regret.values()),
                "by seed": each,
                **{key: mean(ranking[key] for ranking in rankings) for key in free},
            }
        )
    rows.sort(key=lambda row: row["mean regret"])
    for row in rows:
        row["beyond"] = row["mean regret"] - rows[0]["mean regret"]
        row["uncertain"] = None if spread is None else Z * _deviation(row, rows[0], spread, len(seeds))
    return rows


def mean_regret(chosen: dict[int, dict[Subset, float]], known: Truth, least: dict[int, float]) -> float:
    """Return the mean over sizes of what a choice loses to the best of its size."""
    return mean(sum(share * known[s] for s, share in here.items()) - least[size] for size, here in chosen.items())


def _deviation(row: dict[str, Any], best: dict[str, Any], spread: dict[int, float], seeds: int) -> float:
    """Return the standard deviation of the difference between two mean regrets: noise of trainings, and of planning."""
    trainings, a, b = 0.0, row["chosen"], best["chosen"]
    for size in a:
        apart = sum((a[size][subset] - b[size][subset]) ** 2 for subset in {*a[size], *b[size]})
        trainings += apart * spread[size] ** 2 / seeds
    several = [each["by seed"] for each in (row, best) if row is not best and len(each["by seed"]) > 1]
    planning = sum(variance(found) / len(found) for found in several)
    return math.sqrt(trainings / len(a) ** 2 + planning)


def table(folder: Path, study: str, measure: str = "kl") -> str:
    """Format the comparison as Markdown."""
    rows = compare(folder, study, measure)
    first = read(folder / f"{study}_ranks.jsonl")[0]
    sizes = list(rows[0]["regret"])
    headings = ["planner", "Spearman", "within a size", *(f"regret, {size}" for size in sizes), "mean (planning seeds)",
                "beyond the smallest", "inputs", "FLOPs", "/ training", "/ convert"]  # fmt: skip
    cells = []
    for row in rows:
        found = sorted({f"{regret:.4f}" for regret in row["by seed"]})
        between = f" ({found[0]} to {found[-1]})" if len(found) > 1 and row["planner"] != "random" else ""
        interval = "" if row["uncertain"] is None else f" ± {row['uncertain']:.4f}"
        cells.append(
            [
                f"**{row['planner']}**" if row["planner"] == OURS else row["planner"],
                f"{row['spearman']:.3f}",
                f"{row['within']:.3f}",
                *(f"{row['regret'][size]:.4f}" for size in sizes),
                f"{row['mean regret']:.4f}{between}",
                f"{row['beyond']:.4f}{interval}",
                f"{row['inputs']:,.0f}",
                f"{row['flops']:.2g}" if row["flops"] else "0",
                f"{row['flops'] / first['training']:.3f}",
                f"{row['flops'] / first['convert']:.4f}",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, ["---"] * len(headings), *cells))


def about(folder: Path, study: str, measure: str = "kl") -> str:
    """Say what the truth of a study is, and how far its own seeds agree."""
    lines = read(folder / f"{study}_truth.jsonl")
    seeds = truths(folder, study, measure)
    known, spread = averaged(seeds), noise(seeds)
    count = max(map(len, known))
    ends = ", ".join(
        f"{size}: {min(v):.4f} to {max(v):.4f}" + ("" if spread is None else f" (± {spread[size]:.4f})")
        for size in range(1, count + 1)
        if (v := [known[s] for s in known if len(s) == size])
    )
    deviation = "" if spread is None else ", with the deviation between seeds"
    seconds = mean(line["seconds"] for line in lines if line["subset"])
    said = (
        f"{len(seeds)} complete seed{'s' * (len(seeds) != 1)} of {len(known)} subsets, {lines[0]['steps']} steps each "
        f"({seconds:.0f} s on a shared core). {NAMES[measure]} after training by size{deviation}: {ends}."
    )
    if spread is not None:
        overall, within = correlation(seeds[0], seeds[1])
        said += f" Spearman between the seeds: {overall:.3f}, within a size {within:.3f}."
    return said


def draw(folder: Path, study: str, path: Path, measure: str = "kl") -> Path:
    """Draw the truth against what `segue plan` predicts, and the mean regret of every planner."""
    from matplotlib.figure import Figure

    rows = compare(folder, study, measure)
    known = averaged(truths(folder, study, measure))
    scores = read(folder / f"{study}_ranks.jsonl")[0]["rankings"][OURS]["scores"]
    predicted = {tuple(map(int, key.split())): value for key, value in scores.items()}
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    for size in range(1, max(map(len, known)) + 1):
        here = [subset for subset in known if len(subset) == size]
        x, y = [predicted[s] for s in here], [known[s] for s in here]
        left.plot(x, y, "o", markersize=3.5, alpha=0.8, label=str(size))
    left.set(xlabel="KL that segue plan predicts, before training", ylabel=f"{NAMES[measure]} after training")
    left.legend(frameon=False, fontsize=7, title="replaced sites", title_fontsize=7)
    names = [row["planner"] for row in rows]
    colours = ["#c2571a" if name == OURS else "#1f6f8b" for name in names]
    errors = None if rows[0]["uncertain"] is None else [row["uncertain"] for row in rows]
    longest = max(row["mean regret"] + (row["uncertain"] or 0.0) for row in rows)
    bars = right.barh(names, [row["mean regret"] for row in rows], xerr=errors, color=colours, error_kw={"linewidth": 0.8})
    right.bar_label(bars, fmt="%.4f", padding=3, fontsize=7)
    right.invert_yaxis()
    right.tick_params(axis="y", labelsize=8)
    for label in right.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() == OURS else "normal")
    right.set(xlabel=f"mean regret ({NAMES[measure]} after training)", xlim=(0, 1.15 * longest))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    return path
