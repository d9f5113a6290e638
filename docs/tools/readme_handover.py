"""Measure and draw the README's picture: a local fit, a handover, and swap and train, on the same little data.

python docs/tools/readme_handover.py             # ten seeds: about eight minutes on one core
python docs/tools/readme_handover.py --draw      # only the picture, from docs/figures/readme-handover.json
python docs/tools/readme_handover.py --search    # how the setting was chosen, without the test images: about nine minutes

The local fit is that of examples/vit_segue.py, swap and train that of examples/vit_torch.py; a test compares the accuracies.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable
from functools import partial
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

STEPS, COUNT, EVERY = 300, 100, 10
SLOW, ALWAYS = Linear(until=0.5), Constant(alpha=1.0)
Data = tuple[torch.Tensor, torch.Tensor]
Method = Callable[..., segue.Plan] | None  # None: by hand


def handover(**settings: Any) -> Method:
    """Return DCR + DFG with other settings."""
    return partial(segue.methods.dcr_dfg, **{"guidance": segue.losses.FeatureGuidance(), **settings})


SEARCHED: dict[str, Method] = {  # a schedule of the blend and one of the guidance
    "swap and train": None,
    "DCR + DFG as published": handover(),
    "slow, guidance fades": handover(schedule=SLOW, guidance=segue.losses.FeatureGuidance(schedule=SLOW)),
    "guidance to the end": handover(guidance=segue.losses.FeatureGuidance(schedule=ALWAYS)),
    "slow, guidance to the end": handover(schedule=SLOW, guidance=segue.losses.FeatureGuidance(schedule=ALWAYS)),
}
SHOWN: dict[str, tuple[Method, float]] = {  # each at the learning rate that suits it best in --search
    "fit": (segue.methods.local_fit, 4e-3),
    "handover": (SEARCHED["slow, guidance to the end"], 1e-2),
    "swap": (None, 1e-3),
}


def linear(teacher: nn.Module, site: segue.Site) -> nn.Module:
    return LinearAttention(teacher.width, teacher.heads)


def replaced(
    model: nn.Module,
    training: Data,
    method: Method,
    *,
    seed: int,
    lr: float,
    steps: int = STEPS,
    on_eval: Callable[[int, segue.Handover | None], None] | None = None,
) -> nn.Module:
    """Give the model linear attention, by a method or by hand, and evaluate it every few steps."""
    running = None
    model.train()
    if method is None:
        torch.manual_seed(seed)
        model.requires_grad_(False)
        for block in model.blocks:
            block.attn = LinearAttention(block.attn.width, block.attn.heads)
    else:
        running = segue.replace_(model, method(sites="blocks.*.attn", student=linear, seed=seed), total_steps=steps)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    if running is not None:
        running.schedule_rates(optimizer)  # where it has phases with rates of their own
    for step, (images, labels) in enumerate(batches(*few(*training, count=COUNT, seed=seed), steps, seed)):
        if on_eval is not None and step % EVERY == 0:
            on_eval(step, running)
            model.train()
        for loss in losses(model, running, images, labels):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if running is not None:
            running.step()
    if running is not None:
        running.finalize_()
    if on_eval is not None:
        on_eval(steps, None)
    return model


def losses(
    model: nn.Module, running: segue.Handover | None, images: torch.Tensor, labels: torch.Tensor
) -> Iterable[torch.Tensor]:
    """Return the losses of a step: one, or those of a local fit, each of which is an update."""
    if running is None:
        return [F.cross_entropy(model(images), labels)]
    if running.phase is not None and running.phase.local:
        with running.features(complete=False) as features:
            model(images)
        return features.losses()
    return [F.cross_entropy(model(images), labels) + running.aux_loss()]


def curves(name: str, seed: int, steps: int = STEPS) -> tuple[list[float], list[float]]:
    """Return the accuracy of the model as it runs, and of its students alone, at every evaluation."""
    training, test = digits()
    model = pretrained(training)
    method, lr = SHOWN[name]
    blend: list[float] = []
    students: list[float] = []

    def on_eval(step: int, running: segue.Handover | None) -> None:
        blend.append(accuracy(model, *test))
        if running is None or not any(running.alphas.values()):
            students.append(blend[-1])
        else:
            with running.as_student():
                students.append(accuracy(model, *test))

    replaced(model, training, method, seed=seed, lr=lr, steps=steps, on_eval=on_eval)
    return blend, students


def measure(seeds: int, steps: int = STEPS) -> dict[str, Any]:
    """Run every method over the seeds."""
    training, test = digits()
    runs: dict[str, list[list[float]]] = {}
    for seed in range(seeds):
        for name in SHOWN:
            blend, students = curves(name, seed, steps)
            runs.setdefault(name, []).append(students)
            if name == "handover":
                runs.setdefault("blend", []).append(blend)
        print(f"seed {seed}: " + ", ".join(f"{name} {runs[name][-1][-1]:.3f}" for name in SHOWN), flush=True)
    final = {name: [accuracies[-1] for accuracies in runs[name]] for name in SHOWN}
    gains = {
        name: spread([one - by_hand for one, by_hand in zip(final[name], final["swap"], strict=True)])
        for name in SHOWN
        if name != "swap"
    }
    evaluated = [*range(0, steps, EVERY), steps]
    local, _ = segue.methods.local_fit(sites="blocks.*.attn").phases
    return {
        "setting": {"images": COUNT, "steps": steps, "seeds": seeds, "test images": len(test[0])},
        "rates": {name: lr for name, (_, lr) in SHOWN.items()},
        "teacher": round(accuracy(pretrained(training), *test), 4),
        "final": {name: spread(values) for name, values in final.items()},
        "gain": gains,
        "final of every seed": {name: [round(value, 3) for value in values] for name, values in final.items()},
        "jump": round(local.length * steps),
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
    methods = [(name, lr, SEARCHED[name]) for name, lr in tried]
    methods += [("local fit", lr, partial(segue.methods.local_fit, lr=lr)) for lr in (1e-3, 4e-3, 1.6e-2)]
    for name, lr, method in methods:
        models = (replaced(pretrained(seen), seen, method, seed=seed, lr=lr) for seed in range(3))
        accuracies = [accuracy(model, *held_out) for model in models]
        print(f"| {name} | {lr:g} | {interval(accuracies)} |", flush=True)


def draw(measured: dict[str, Any], path: Path) -> None:
    """Draw means as lines and 95 % intervals as bands, in percent."""
    from matplotlib.figure import Figure

    dark, grey, blue, light, orange, green = "#24292f", "#6e7781", "#0969da", "#4393e0", "#d1570c", "#1a7f37"
    figure = Figure(figsize=(12, 6), dpi=110, facecolor="white")
    axes = figure.add_axes((0.058, 0.105, 0.7, 0.735))
    steps, last, jump = measured["steps"], measured["steps"][-1], measured["jump"]
    takeover = next(step for step, alpha in zip(steps, measured["alpha"], strict=True) if alpha == 0)

    axes.fill_between(steps, [100 * alpha for alpha in measured["alpha"]], color=grey, alpha=0.08, linewidth=0)
    axes.axhline(100 * measured["teacher"], color=dark, linewidth=1.2, linestyle=(0, (6, 4)))
    dots = (0, (1.6, 1))
    lines = (
        ("swap", orange, "-", 0, last),
        ("handover", light, dots, 0, takeover),
        ("blend", blue, "-", 0, last),
        ("fit", green, dots, 0, jump),
        ("fit", green, "-", jump, last),
    )
    for name, color, style, begin, end in lines:
        shown = [(step, 100 * mean, 100 * half) for step, (mean, half) in zip(steps, measured["curves"][name], strict=True)]
        x, mean, half = zip(*(point for point in shown if begin <= point[0] <= end), strict=True)
        low, high = ([m + sign * h for m, h in zip(mean, half, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0)
        axes.plot(x, mean, color=color, linestyle=style, linewidth=2.8)

    for at, height, text, color in (
        (0.012, 0.035, "alpha of DCR, the teacher's share", grey),
        (0.53, 0.36, "local fit; dotted: its students before the jump", green),
        (0.53, 0.29, "DCR + DFG; dotted: its students alone", blue),
        (0.53, 0.22, "swap and train", orange),
    ):
        axes.text(at, height, text, color=color, fontsize=12.5, va="center", transform=axes.transAxes)
    ends = [(f"teacher {100 * measured['teacher']:.1f} %", measured["teacher"] + 0.05, dark)]
    for name, text, color in (("fit", "local fit", green), ("handover", "DCR + DFG", blue), ("swap", "swap and train", orange)):
        mean, half = measured["final"][name]
        ends.append((f"{text} {100 * mean:.1f} ± {100 * half:.1f} %", mean, color))
    above = math.inf
    for text, mean, color in sorted(ends, key=lambda end: -end[1]):
        above = min(100 * mean, above - 4.8)  # where lines end close together
        axes.text(1.013 * last, above, text, color=color, fontsize=12, va="center", weight="bold")

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
