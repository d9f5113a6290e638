"""python -m experiments.planner truth | rank | report: see the package."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch

from experiments.planner import report
from experiments.planner.planners import rank, subsets
from experiments.planner.studies import STUDIES, Study, convert_flops, evaluated, trained, training_flops
from segue.sites import select

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run one part of the study; what is in its file already is not repeated."""
    options = _options()
    torch.set_num_threads(1)
    folder = Path(options.out or (RESULTS if options.part == "report" else "runs/planner"))
    folder.mkdir(parents=True, exist_ok=True)
    if options.part == "report":
        for name in STUDIES:
            if (folder / f"{name}_ranks.jsonl").exists() and (folder / f"{name}_truth.jsonl").exists():
                print(f"## {name}", report.about(folder, name, options.measure), sep="\n\n", end="\n\n")
                print(report.table(folder, name, options.measure), end="\n\n")
                report.draw(folder, name, Path(options.figures) / f"planner-{name}.png", options.measure)
        return
    given = {name: getattr(options, name) for name in ("model", "data", "test") if getattr(options, name)}
    limits = {} if options.steps is None else {"steps": options.steps}
    study = STUDIES[options.study](work=folder, **given, **limits)
    (_truth if options.part == "truth" else _rank)(study, folder, options)


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["truth", "rank", "report"])
    parser.add_argument("study", nargs="?", choices=[*STUDIES], default="drop")
    parser.add_argument("--out", help="Folder of the results; by default runs/planner, and of a report the committed ones.")
    parser.add_argument("--figures", default="runs/planner", help="Folder of the figures.")
    parser.add_argument("--model", help="Folder of the pretrained model.")
    parser.add_argument("--data", help="Text, or TSV file to train on.")
    parser.add_argument("--test", help="TSV file to evaluate on.")
    parser.add_argument("--steps", type=int, help="Number of optimizer steps of a training.")
    parser.add_argument("--seeds", type=int, default=2, help="Number of seeds.")
    parser.add_argument("--most", type=int, help="Largest number of trainings of this call.")
    parser.add_argument("--fit-steps", type=int, help="Number of steps of the local fit; by default that of `segue plan`.")
    parser.add_argument("--subsets", type=int, help="Number of random subsets; by default that of `segue plan`.")
    parser.add_argument("--cheap", action="store_true", help="Rank by what the plan has measured alone.")
    parser.add_argument("--measure", choices=["kl", "loss"], default="kl", help="What the truth is after training.")
    return parser.parse_args()


def _truth(study: Study, folder: Path, options: Any) -> None:
    """Train every subset that is not in the file yet, small and large ones in turn."""
    path = folder / f"{study.name}_truth.jsonl"
    names = [site.name for site in select(study.model, study.sites)]
    lines = report.read(path)
    if any(line["steps"] != study.steps for line in lines):
        raise SystemExit(f"{path} has trainings of {lines[0]['steps']} steps, not of {study.steps}: give another --out.")
    known = {(tuple(line["subset"]), line["seed"]) for line in lines}
    everything = subsets(len(names))
    order = [subset for pair in zip(everything, reversed(everything), strict=True) for subset in pair]
    waiting = [(s, seed) for seed in range(options.seeds) for s in ((), *dict.fromkeys(order)) if (s, seed) not in known]
    for subset, seed in waiting[: options.most]:
        begun = time.perf_counter()
        chosen = tuple(names[i] for i in subset)
        model = trained(study, chosen, seed) if subset else study.model
        seconds = round(time.perf_counter() - begun, 1)
        found = {name: round(value, 7) for name, value in evaluated(study, model).items()}
        line = {"subset": subset, "seed": seed, "steps": study.steps, **found, "seconds": seconds}
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")
        print(line, flush=True)


def _rank(study: Study, folder: Path, options: Any) -> None:
    path = folder / f"{study.name}_ranks.jsonl"
    known = {line["seed"] for line in report.read(path)}
    settings = {name: value for name in ("fit_steps", "subsets") if (value := getattr(options, name)) is not None}
    for seed in range(options.seeds):
        if seed in known:
            continue
        found = rank(study, seed, folder / f"{study.name}_plan_{seed}", cheap=options.cheap, **settings)
        rankings = {}
        for name, ranking in found.items():
            scores = {" ".join(map(str, subset)): round(score, 6) for subset, score in ranking.scores.items()}
            rankings[name] = {**dataclasses.asdict(ranking), "scores": scores}
        names = tuple(site.name for site in select(study.model, study.sites))
        counted = {"training": training_flops(study, names), "convert": convert_flops(study)}
        line = {"seed": seed, **counted, "rankings": rankings}
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")
        print(f"seed {seed}: {', '.join(rankings)}", flush=True)


if __name__ == "__main__":
    main()
