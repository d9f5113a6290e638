"""Measure and draw the README's picture: a handover, and swap and train, on the same little data.

python docs/tools/readme_handover.py             # ten seeds: about four minutes on one core
python docs/tools/readme_handover.py --draw      # only the picture, from docs/figures/readme-handover.json
python docs/tools/readme_handover.py --search    # how the setting was chosen, without the test images: about five minutes

The setting is that of examples/vit_torch.py and examples/vit_segue.py; a test compares the accuracies.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

import segue
from segue.schedules import Constant, Linear

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"
sys.path.insert(0, str(ROOT / "examples"))

from small_vit import LinearAttention, accuracy, batches, digits, few, interval, pretrained  # noqa: E402

STEPS, LR, COUNT, EVERY = 300, 1e-3, 100, 10
SLOW, ALWAYS = Linear(until=0.5), Constant(alpha=1.0)
Data = tuple[torch.Tensor, torch.Tensor]
SEARCHED: dict[str, dict[str, Any] | None] = {  # a schedule of the blend and one of the guidance; None: by hand
    "swap and train": None,
    "DCR + DFG as published": {"guidance": segue.losses.FeatureGuidance()},
    "slow, guidance fades": {"schedule": SLOW, "guidance": segue.losses.FeatureGuidance(schedule=SLOW)},
    "guidance to the end": {"guidance": segue.losses.FeatureGuidance(schedule=ALWAYS)},
    "slow, guidance to the end": {"schedule": SLOW, "guidance": segue.losses.FeatureGuidance(schedule=ALWAYS)},
}
CHOSEN = SEARCHED["slow, guidance to the end"]


def linear(teacher: nn.Module, site: segue.Site) -> nn.Module:
    return LinearAttention(teacher.width, teacher.heads)


def replaced(
    model: nn.Module,
    training: Data,
    settings: dict[str, Any] | None,
    *,
    seed: int,
    steps: int = STEPS,
    lr: float = LR,
    on_eval: Callable[[int, segue.Handover | None], None] | None = None,
) -> nn.Module:
    """Give the model linear attention, by a handover or by hand, and evaluate it every few steps."""
    handover = None
    model.train()
    if settings is None:
        torch.manual_seed(seed)
        model.requires_grad_(False)
        for block in model.blocks:
            block.attn = LinearAttention(block.attn.width, block.attn.heads)
    else:
        plan = segue.methods.dcr_dfg(sites="blocks.*.attn", student=linear, seed=seed, **settings)
        handover = segue.replace_(model, plan, total_steps=steps)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step, (images, labels) in enumerate(batches(*few(*training, count=COUNT, seed=seed), steps, seed)):
        if on_eval is not None and step % EVERY == 0:
            on_eval(step, handover)
            model.train()
        loss = F.cross_entropy(model(images), labels) + (0.0 if handover is None else handover.aux_loss())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if handover is not None:
            handover.step()
    if handover is not None:
        handover.finalize_()
    if on_eval is not None:
        on_eval(steps, None)
    return model


def curves(settings: dict[str, Any] | None, seed: int, **changes: Any) -> tuple[list[float], list[float]]:
    """Return the accuracy of the model as it runs, and of its students alone, at every evaluation."""
    training, test = digits()
    model = pretrained(training)
    blend: list[float] = []
    students: list[float] = []

    def on_eval(step: int, handover: segue.Handover | None) -> None:
        blend.append(accuracy(model, *test))
        if handover is None or not any(handover.alphas.values()):
            students.append(blend[-1])
        else:
            with handover.as_student():
                students.append(accuracy(model, *test))

    replaced(model, training, settings, seed=seed, on_eval=on_eval, **changes)
    return blend, students


def measure(seeds: int, steps: int = STEPS) -> dict[str, Any]:
    """Run both over the seeds."""
    training, test = digits()
    runs: dict[str, list[list[float]]] = {"blend": [], "students": [], "swap": []}
    for seed in range(seeds):
        blend, students = curves(CHOSEN, seed, steps=steps)
        swap, _ = curves(None, seed, steps=steps)
        for name, accuracies in zip(runs, (blend, students, swap), strict=True):
            runs[name].append(accuracies)
        print(f"seed {seed}: handover {students[-1]:.3f}, swap and train {swap[-1]:.3f}", flush=True)
    final = {name: [accuracies[-1] for accuracies in runs[name]] for name in ("students", "swap")}
    evaluated = [*range(0, steps, EVERY), steps]
    return {
        "setting": {"images": COUNT, "steps": steps, "lr": LR, "seeds": seeds, "test images": len(test[0])},
        "teacher": round(accuracy(pretrained(training), *test), 4),
        "final": {name: spread(values) for name, values in final.items()},
        "gain": spread([with_teacher - alone for with_teacher, alone in zip(*final.values(), strict=True)]),
        "final of every seed": {name: [round(value, 3) for value in values] for name, values in final.items()},
        "steps": evaluated,
        "alpha": [round(SLOW(step / steps, segue.Site("any")), 3) for step in evaluated],
        "curves": {
            name: [spread(list(values)) for values in zip(*accuracies, strict=True)] for name, accuracies in runs.items()
        },
    }


def spread(values: list[float]) -> list[float]:
    """Return the mean and half the width of its 95 % interval (Student's t)."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values) if len(values) > 1 else 0.0
    return [round(sum(values) / len(values), 4), round(float(half), 4)]


def search() -> None:
    """Compare settings on 300 images of the training set, by a teacher that never saw them."""
    (images, labels), _ = digits()
    seen, held_out = (images[:-300], labels[:-300]), (images[-300:], labels[-300:])
    print(f"teacher {accuracy(pretrained(seen), *held_out):.3f}\n")
    print("| setting | learning rate | accuracy |\n|---|---|---|")
    tried = [(name, lr) for name in SEARCHED for lr in (1e-3, 3e-3)]
    tried += [("swap and train", 1e-2), ("slow, guidance to the end", 1e-2)]
    for name, lr in tried:
        models = (replaced(pretrained(seen), seen, SEARCHED[name], seed=seed, lr=lr) for seed in range(3))
        accuracies = [accuracy(model, *held_out) for model in models]
        print(f"| {name} | {lr:g} | {interval(accuracies)} |", flush=True)


def draw(measured: dict[str, Any], path: Path) -> None:
    """Draw means as lines and 95 % intervals as bands, in percent."""
    from matplotlib.figure import Figure

    dark, grey, blue, light, orange = "#24292f", "#6e7781", "#0969da", "#4393e0", "#d1570c"
    figure = Figure(figsize=(12, 6), dpi=110, facecolor="white")
    axes = figure.add_axes((0.058, 0.105, 0.765, 0.735))
    steps, last = measured["steps"], measured["steps"][-1]
    takeover = next(step for step, alpha in zip(steps, measured["alpha"], strict=True) if alpha == 0)

    axes.fill_between(steps, [100 * alpha for alpha in measured["alpha"]], color=grey, alpha=0.08, linewidth=0)
    axes.axhline(100 * measured["teacher"], color=dark, linewidth=1.2, linestyle=(0, (6, 4)))
    lines = {"swap": (orange, "-", last), "students": (light, (0, (1.6, 1)), takeover), "blend": (blue, "-", last)}
    for name, (color, style, until) in lines.items():
        shown = [(step, 100 * mean, 100 * half) for step, (mean, half) in zip(steps, measured["curves"][name], strict=True)]
        x, mean, half = zip(*(point for point in shown if point[0] <= until), strict=True)
        low, high = ([m + sign * h for m, h in zip(mean, half, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0)
        axes.plot(x, mean, color=color, linestyle=style, linewidth=2.8)

    for at, height, text, color in (
        (0.012, 0.035, "alpha, the teacher's share, from 1 to 0", grey),
        (0.012, 0.925, "the model during its handover", blue),
        (0.355, 0.43, "its students alone", light),
    ):
        axes.text(at, height, text, color=color, fontsize=12.5, va="center", transform=axes.transAxes)
    for name, text, color, lower in (("students", "handover", blue, 0.2), ("swap", "swap and train", orange, 3.2)):
        mean, half = (100 * value for value in measured["final"][name])
        label = f"{text}\n{mean:.1f} ± {half:.1f} %"
        axes.text(1.013 * last, mean - lower, label, color=color, fontsize=13, va="center", weight="bold", linespacing=1.15)
    teacher = 100 * measured["teacher"]
    axes.text(1.013 * last, teacher + 1.3, f"teacher {teacher:.1f} %", color=dark, fontsize=12.5, va="center")

    setting = measured["setting"]
    title = f"Linear attention in a trained ViT, learnt from {setting['images']} images"
    subtitle = f"digits: accuracy on {setting['test images']} others in %, mean and 95 % interval over {setting['seeds']} seeds"
    figure.text(0.058, 0.93, title, color=dark, fontsize=17, weight="bold")
    figure.text(0.058, 0.875, subtitle, color=grey, fontsize=12.5)
    axes.set(xlim=(0, last), ylim=(0, 101), yticks=range(0, 101, 20))
    axes.set_xlabel("training step", color=grey, fontsize=12)
    axes.tick_params(colors=grey, labelsize=11.5, length=0, pad=6)
    axes.grid(axis="y", color=grey, alpha=0.16, linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.savefig(path, facecolor="white")


def main(seeds: int, folder: Path, only_draw: bool, only_search: bool) -> None:
    if only_search:
        return search()
    numbers = folder / "readme-handover.json"
    if not only_draw:
        lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in measure(seeds).items())
        numbers.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    draw(json.loads(numbers.read_text(encoding="utf-8")), folder / "readme-handover.png")
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds")
    parser.add_argument("--folder", type=Path, default=FIGURES, help="where the numbers and the picture are")
    parser.add_argument("--draw", dest="only_draw", action="store_true", help="draw the numbers that are there")
    parser.add_argument("--search", dest="only_search", action="store_true", help="compare settings on held-out images")
    main(**vars(parser.parse_args()))
