"""The report: how well each planner's ranking agrees with the truth, and what its choice at each size loses."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

from scipy.stats import spearmanr

from experiments.planner.planners import RANDOM, Subset, random_scores


def read(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a file; one that was cut off is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def truth(folder: Path, study: str, measure: str) -> dict[Subset, float]:
    """Return the mean over seeds of what a subset costs after training."""
    found: dict[Subset, list[float]] = {}
    for line in read(folder / f"{study}_truth.jsonl"):
        if line["subset"]:
            found.setdefault(tuple(line["subset"]), []).append(line[measure])
    return {subset: mean(values) for subset, values in found.items()}


def agreement(scores: dict[Subset, float], known: dict[Subset, float]) -> dict[str, Any]:
    """Compare a ranking with the truth: Spearman over all subsets and within a size, and the regret at each size."""
    both = [subset for subset in known if subset in scores]
    sizes = sorted({len(subset) for subset in both})
    regret, within = {}, []
    for size in sizes:
        here = [subset for subset in both if len(subset) == size]
        chosen = min(here, key=scores.__getitem__)
        regret[size] = known[chosen] - min(known[subset] for subset in here)
        if len(here) > 2:
            within.append(float(spearmanr([scores[s] for s in here], [known[s] for s in here]).statistic))
    overall = float(spearmanr([scores[s] for s in both], [known[s] for s in both]).statistic)
    return {"spearman": overall, "within": mean(within) if within else float("nan"), "regret": regret}


def compare(folder: Path, study: str, measure: str) -> list[dict[str, Any]]:
    """Return a row for each planner, the mean over the seeds of its ranking."""
    known = truth(folder, study, measure)
    rankings: dict[str, list[dict[str, Any]]] = {}
    for line in read(folder / f"{study}_ranks.jsonl"):
        for name, found in line["rankings"].items():
            scores = {tuple(map(int, key.split())): value for key, value in found["scores"].items()}
            rankings.setdefault(name, []).append({**agreement(scores, known), **{k: found[k] for k in ("inputs", "flops")}})
    count = max(map(len, known))
    rankings["random"] = [
        {**agreement(random_scores(count, seed), known), "inputs": 0.0, "flops": 0.0} for seed in range(RANDOM)
    ]
    rows = []
    for name, several in rankings.items():
        regret = {size: mean(one["regret"][size] for one in several) for size in several[0]["regret"]}
        row = {key: mean(one[key] for one in several) for key in ("spearman", "within", "inputs", "flops")}
        rows.append({"planner": name, **row, "regret": regret, "mean regret": mean(regret.values())})
    return sorted(rows, key=lambda row: row["mean regret"])


def table(folder: Path, study: str, measure: str = "kl") -> str:
    """Format the comparison as Markdown."""
    rows = compare(folder, study, measure)
    lines = read(folder / f"{study}_truth.jsonl")
    training = mean(line["flops"] for line in lines if line["subset"])
    sizes = list(rows[0]["regret"])
    headings = [
        "planner",
        "Spearman",
        "within a size",
        *(f"regret, {size}" for size in sizes),
        "mean regret",
        "inputs",
        "FLOPs / training",
    ]
    cells = [
        [
            row["planner"],
            f"{row['spearman']:.3f}",
            f"{row['within']:.3f}",
            *(f"{row['regret'][size]:.4f}" for size in sizes),
            f"{row['mean regret']:.4f}",
            f"{row['inputs']:,.0f}",
            f"{row['flops'] / training:.3f}",
        ]
        for row in rows
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, ["---"] * len(headings), *cells))


def draw(folder: Path, study: str, path: Path, measure: str = "kl") -> Path:
    """Draw the truth against the prediction of the best-known planners, and their regrets."""
    from matplotlib.figure import Figure

    rows = compare(folder, study, measure)
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for row in rows:
        axes.plot(list(row["regret"]), list(row["regret"].values()), "o-", markersize=3, linewidth=1, label=row["planner"])
    axes.set(xlabel="replaced sites", ylabel=f"regret ({measure} after training)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    return path
