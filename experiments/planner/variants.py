"""python -m experiments.planner.variants narrow --out FOLDER: which measurements predict what is left after training?

All 63 subsets are measured before training, prediction by prediction, so that models of damage can be compared on as few or as
many predictions as wanted: the docs' table of what was tried. The truth is the one in the committed results.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.planner import report
from experiments.planner.__main__ import RESULTS
from experiments.planner.planners import Subset, defaults, subsets
from experiments.planner.studies import STUDIES, Study
from segue.core.blending import padding_mask
from segue.planning import damage
from segue.planning.candidates import Candidates, candidates_on, named
from segue.planning.fitting import fit_candidates, fit_recipe
from segue.planning.journal import Journal
from segue.planning.prediction import predicted, quadratic
from segue.training.progress import Progress

FITTED = 4  # batches of the local fit, after the first two


@torch.no_grad()
def _on(candidates: Candidates, batch: Any, everything: list[Subset]) -> tuple[Tensor, Tensor]:
    """Return the KL of all subsets, (subsets, predictions), and H of each prediction."""
    options, mask = candidates.options, padding_mask(batch)

    def shown(subset: Subset) -> Tensor:
        with candidates.showing([options[i] for i in subset]) as model:
            return damage.counted(damage.logits(model, batch), mask).log_softmax(-1)

    before = shown(())
    kl = [F.kl_div(shown(s), before, reduction="none", log_target=True).sum(-1).double() for s in everything]
    products = [damage.counted(damage.product_of(candidates, option, batch)[1], mask) for option in options]
    shares = before.exp()
    rows = torch.stack([(p - (shares * p).sum(-1, keepdim=True)) * shares.sqrt() for p in products], 1)
    return torch.stack(kl), (rows @ rows.transpose(1, 2)).double()


def record(study: Study, seed: int, count: int) -> dict[str, Any]:
    """Fit the students of a study, and measure all subsets on so many batches."""
    every = study.planning_batches(seed)
    held = [*every[:2], *every[2 + FITTED : count + FITTED]]
    with candidates_on(study.model, study.sites, named([study.student]), every[0], seed) as candidates:
        steps = defaults()["fit_steps"]
        recipe, journal = fit_recipe(steps, defaults()["lr"]), Journal(None, "")
        fitted = every[2 : 2 + FITTED]
        fit_candidates(candidates, fitted, recipe, journal, closed_form=False, shown=Progress(None, steps))
        found = [_on(candidates, batch, subsets(len(candidates.options))) for batch in held]
    kl, curved = (list(parts) for parts in zip(*found, strict=True))
    return {"kl": torch.cat(kl, 1), "H": torch.cat(curved), "sizes": [part.shape[1] for part in kl]}


def models(kl: Tensor, curved: Tensor, size: int, seed: int) -> dict[str, Tensor]:
    """Predict all subsets by each model of damage, from some predictions, in batches of a size."""
    everything = subsets(curved.shape[-1])
    options = [(str(i), "") for i in range(curved.shape[-1])]
    place = {subset: i for i, subset in enumerate(everything)}
    inside = torch.zeros(len(everything), len(options), dtype=torch.float64)
    for row, subset in enumerate(everything):
        inside[row, [*subset]] = 1.0

    def added(singles: Tensor, pairs: Tensor) -> Tensor:
        return inside @ singles + torch.einsum("ni,ij,nj->n", inside, pairs, inside)

    whole = kl.mean(1)
    alone, matrix = whole[: len(options)], curved[: 2 * size].mean(0)
    swapped = torch.zeros_like(matrix)
    for i, j in (pair for pair in everything if len(pair) == 2):
        swapped[i, j] = whole[place[i, j]] - alone[i] - alone[j]
    drawn = damage.random_subsets(options, defaults()["subsets"], seed)
    rows = [place[tuple(int(site) for site, _ in subset)] for subset in drawn]
    parts = kl.split(size, 1)
    turns = [torch.cat([parts[k % len(parts)][row] for k in {2 * i, 2 * i + 1}]).mean() for i, row in enumerate(rows)]
    ours = predicted(options, alone.tolist(), matrix, drawn, [float(y) for y in turns])
    none = torch.zeros_like(matrix)
    return {
        "leave one out": added(alone, none),
        "leave one out + pairs of swaps": added(alone, swapped),
        "quadratic form": added(*quadratic(options, curved.mean(0))),
        "leave one out + pairs of the form": added(alone, quadratic(options, matrix)[1]),
        "segue plan": added(ours.singles, ours.pairs),
        "all 63 subsets measured": whole,
    }


def main() -> None:
    """Print the mean regret of each model by the number of predictions, for every planning seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=[*STUDIES])
    parser.add_argument("--out", default="runs/planner/variants", help="Folder of the measurements, and of teachers.")
    parser.add_argument("--seeds", type=int, default=2, help="Number of planning seeds.")
    parser.add_argument("--batches", type=int, default=16, help="Number of batches to measure on.")
    for name in ("model", "data", "test"):
        parser.add_argument(f"--{name}", help="As of `python -m experiments.planner`.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(options.out)
    known = report.averaged(report.truths(RESULTS, options.study, "kl"))
    least = {size: min(known[s] for s in known if len(s) == size) for size in {len(s) for s in known}}
    found: dict[str, dict[int, list[float]]] = {}
    study: Study | None = None
    for seed in range(options.seeds):
        place = folder / f"{options.study}_{seed}.pt"
        if not place.exists():
            given = {name: value for name in ("model", "data", "test") if (value := getattr(options, name))}
            study = study or STUDIES[options.study](work=folder, **given)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(record(study, seed, options.batches), place)
        kept = torch.load(place, weights_only=True)
        size, count = kept["sizes"][0], 2
        while count <= len(kept["sizes"]):
            made = models(kept["kl"][:, : count * size], kept["H"][: count * size], size, seed)
            for name, values in made.items():
                scores = dict(zip(subsets(kept["H"].shape[-1]), values.tolist(), strict=True))
                regret = report.mean_regret(report.choices(scores, known), known, least)
                found.setdefault(name, {}).setdefault(count * size, []).append(regret)
            count *= 2
    sizes = list(next(iter(found.values())))
    rows = [[name, *(f"{mean(by[n]):.4f} ({min(by[n]):.4f} to {max(by[n]):.4f})" for n in sizes)] for name, by in found.items()]
    for row in (["mean regret, predictions:", *map(str, sizes)], ["---"] * (1 + len(sizes)), *rows):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
