"""Hand over the attention of a small vision transformer, from its teacher to re-initialised students.

Command: python -m segue.lab.demo (or `make demo`); about a minute and a half on two cores.
Expected: the plain swap drops the accuracy from about 0.97 to chance; after DCR + DFG the students alone are back at the
teacher's level. Writes handover.png, metrics.json and the finished model to runs/demo.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import segue
from segue.errors import MissingExtraError
from segue.lab.data import Digits, Split, digits
from segue.lab.models import DigitsViT

SITES = "blocks.*.attn"
TEACHER_STEPS = 600
BATCH = 64
LEARNING_RATE = 3e-3
EARLY_LOOKS, LATE_LOOKS = 20, 7  # so many in the first quarter, where most happens, and in each of the others
QUARTERS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Point:
    """What one look at the running handover saw."""

    step: int
    alpha: float
    loss: float | None  # of the last training batch, guidance included
    blend: float  # validation accuracy of the model as it trains
    students: float  # of the students alone
    cosine: dict[str, float]  # interface cosine by site, on the students' own stream

    @property
    def mean_cosine(self) -> float:
        return sum(self.cosine.values()) / len(self.cosine)


def main(arguments: list[str] | None = None) -> int:
    """Run the demo and return the shell's exit code."""
    options = _options(arguments)
    _require_matplotlib()
    torch.set_num_threads(1)  # the model is tiny: more threads would only wait for each other
    begun = time.perf_counter()
    data = digits()
    torch.manual_seed(options.seed)
    model = DigitsViT()
    train_teacher(model, data.train, options.teacher_steps, options.seed)
    teacher_accuracy = accuracy(model, data.validation)

    plan = segue.methods.dcr_dfg(sites=SITES, seed=options.seed)
    handover = segue.replace_(model, plan, total_steps=options.steps)
    optimizer = torch.optim.AdamW(handover.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    points = list(hand_over(handover, optimizer, data, options.seed))
    verification = handover.verify(data.validation.images, optimizer=optimizer)

    handover.finalize_()
    checkpoint = segue.save(model, options.out / "model")
    require_equal_after_reload(model, checkpoint, data.validation.images)

    print(f"\n{table(teacher_accuracy, points)}\n\n{verification}")
    print("ok    saved, loaded into a fresh model, equal outputs bit for bit\n")
    metrics = {
        "seed": options.seed,
        "steps": options.steps,
        "teacher_steps": options.teacher_steps,
        "plan": plan.to_dict(),
        "teacher_accuracy": teacher_accuracy,
        "swap_accuracy": points[0].students,
        "points": [asdict(point) for point in points],
        "verified": [check.claim for check in verification.checks],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "seconds": round(time.perf_counter() - begun, 1),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    draw(metrics, options.out / "handover.png")
    for path in (options.out / "handover.png", options.out / "metrics.json", checkpoint):
        print(path)
    print(f"{metrics['seconds']:.0f} seconds in all.")
    return 0


def train_teacher(model: nn.Module, train: Split, steps: int, seed: int) -> None:
    """Train the original model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    rate = _warm_up_and_cool_down(optimizer, steps)
    say = Progress("teacher ", steps)
    for step, (images, labels) in zip(range(1, steps + 1), train.batches(BATCH, seed), strict=False):
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        _descend(optimizer, loss)
        rate.step()
        say(step, f"loss {loss.item():.3f}")


def hand_over(handover: segue.Handover, optimizer: torch.optim.Optimizer, data: Digits, seed: int) -> Iterator[Point]:
    """Train the students through the whole handover and yield a point every now and then."""
    model, steps = handover.model, handover.total_steps
    assert steps is not None
    rate = _warm_up_and_cool_down(optimizer, steps)
    looks = _when_to_look(steps)
    say = Progress("handover", steps)
    yield look(handover, data.validation, None)
    for step, (images, labels) in zip(range(1, steps + 1), data.train.batches(BATCH, seed), strict=False):
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1) + handover.aux_loss()
        _descend(optimizer, loss)
        handover.step()
        rate.step()
        if step in looks:
            point = look(handover, data.validation, loss.item())
            yield point
            accuracies = f"blend {point.blend:.3f}  students {point.students:.3f}"
            say(step, f"alpha {point.alpha:.2f}  {accuracies}  cosine {point.mean_cosine:.2f}")


def look(handover: segue.Handover, validation: Split, loss: float | None) -> Point:
    """Measure the running handover on the validation images."""
    alphas = handover.alphas
    blend = accuracy(handover.model, validation)
    with handover.as_student():
        students = accuracy(handover.model, validation)
    cosine = {name: alike.cosine for name, alike in handover.similarity(validation.images).items()}
    return Point(handover.steps_done, sum(alphas.values()) / len(alphas), loss, blend, students, cosine)


@torch.no_grad()
def accuracy(model: nn.Module, split: Split) -> float:
    """Return the share of images that a model names rightly, in evaluation mode."""
    training = model.training
    model.eval()
    right: Tensor = model(split.images).argmax(1) == split.labels
    model.train(training)
    return right.float().mean().item()


@torch.no_grad()
def require_equal_after_reload(model: nn.Module, checkpoint: Path, images: Tensor) -> None:
    """Load what was saved into a fresh model and compare the outputs bit for bit."""
    fresh = segue.load_(DigitsViT(), checkpoint)
    if not torch.equal(fresh.eval()(images), model.eval()(images)):
        raise segue.errors.CheckpointError(
            "the finished model was saved and loaded into a fresh one.",
            "Their outputs differ.",
            "please report this with the folder's metrics.json.",
        )


def table(teacher_accuracy: float, points: list[Point]) -> str:
    """Say in numbers how the handover went, as Markdown."""
    steps = points[-1].step
    rows = [
        ("teacher", f"{teacher_accuracy:.3f}"),
        ("plain swap, no training", f"{points[0].students:.3f}"),
    ]
    for quarter in QUARTERS:
        point = min(points, key=lambda point: abs(point.step - quarter * steps))
        rows.append((f"students alone at {quarter:.0%}", f"{point.students:.3f}"))
    lines = ["| validation accuracy | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    cosine = points[-1].cosine
    names = [name.split(".")[1] for name in cosine]
    lines += [
        "",
        f"| block | {' | '.join(names)} | mean |",
        f"|---|{'---|' * (len(names) + 1)}",
        f"| interface cosine | {' | '.join(f'{c:.2f}' for c in cosine.values())} | {points[-1].mean_cosine:.2f} |",
    ]
    return "\n".join(lines)


class Progress:
    """Tell how far a loop is: one line that renews itself in a terminal, else a line at every tenth."""

    def __init__(self, what: str, steps: int) -> None:
        self.what, self.steps = what, steps
        self.alive = sys.stdout.isatty()
        self.tenth = 0

    def __call__(self, step: int, news: str) -> None:
        tenth = 10 * step // self.steps
        done = f"{step / self.steps:>4.0%}  {news}"
        if self.alive:
            end = "\n" if step == self.steps else ""
            print(f"\r{self.what} [{'#' * tenth:<10}] {done}", end=end, flush=True)
        elif tenth > self.tenth:
            print(f"{self.what} {done}", flush=True)
        self.tenth = tenth


# From the palette of Okabe and Ito, which people with any colour vision can tell apart.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#6b6b6b"
LOOK: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.3,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.08,
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
}


def draw(metrics: dict[str, Any], path: Path) -> None:
    """Draw alpha, accuracy and interface cosine against the step, from the saved metrics alone."""
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    points = metrics["points"]
    steps = [point["step"] for point in points]
    takeover = next((point["step"] for point in points if point["alpha"] == 0), steps[-1])
    until = steps.index(takeover) + 1
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(7.5, 7.5), dpi=150, layout="constrained")
        shares, accuracies, cosines = figure.subplots(3, 1, sharex=True, height_ratios=(0.8, 1.6, 1.6))
        figure.suptitle("DCR + DFG hands over the attention of a small vision transformer", fontsize=12)

        shares.set_title("teacher's share, alpha", loc="left", fontsize=10)
        alphas = [point["alpha"] for point in points]
        shares.fill_between(steps, alphas, color=GREEN, alpha=0.2, linewidth=0)
        shares.plot(steps, alphas, color=GREEN)
        shares.set(ylim=(0, 1.05), yticks=(0, 0.5, 1))
        shares.annotate("from here the students are alone", (takeover, 0.5), (6, 0), textcoords="offset points", color=GREY)

        accuracies.set_title("validation accuracy", loc="left", fontsize=10)
        teacher, swap = metrics["teacher_accuracy"], metrics["swap_accuracy"]
        blend, students = ([point[side] for point in points] for side in ("blend", "students"))
        accuracies.axhline(teacher, color=GREY, linewidth=1, linestyle=":")
        accuracies.plot(steps[:until], blend[:until], color=ORANGE, linestyle="--", label="blend, as it trains")
        accuracies.plot(steps, students, color=BLUE, label="students alone")
        accuracies.plot(0, swap, "o", color=BLUE, clip_on=False)
        accuracies.annotate(f"plain swap {swap:.2f}", (0, swap), (8, -4), textcoords="offset points", color=BLUE, va="top")
        accuracies.set(ylim=(0, 1.05))
        accuracies.legend(frameon=False, loc="center right")
        _name_ends(
            accuracies, [(f"teacher {teacher:.2f}", teacher, GREY), (f"students {students[-1]:.2f}", students[-1], BLUE)]
        )

        cosines.set_title("interface cosine: teacher and student on the same input", loc="left", fontsize=10)
        names = list(points[0]["cosine"])
        shades = matplotlib.colormaps["cividis"]
        ends = []
        for i, name in enumerate(names):
            values = [point["cosine"][name] for point in points]
            shade = shades(0.85 * i / max(1, len(names) - 1))
            cosines.plot(steps, values, color=shade, linewidth=1.2)
            ends.append((f"block {name.split('.')[1]}", values[-1], shade))
        means = [sum(point["cosine"].values()) / len(names) for point in points]
        cosines.plot(steps, means, color="black", linewidth=2.5)
        _name_ends(cosines, [*ends, (f"mean {means[-1]:.2f}", means[-1], "black")])
        cosines.set(xlabel="optimizer step", xlim=(0, steps[-1]))

        for axes in (shares, accuracies, cosines):
            axes.axvline(takeover, color=GREY, linewidth=1, alpha=0.5)
        figure.savefig(path)


def _name_ends(axes: Any, ends: list[tuple[str, float, Any]]) -> None:
    """Write each line's name at its right end, moved apart where two would overlap."""
    low, high = axes.get_ylim()
    ends = sorted(ends, key=lambda end: end[1])
    places: list[float] = []
    for _, value, _ in ends:
        places.append(max(value, places[-1] + 0.075 * (high - low)) if places else value)
    moved = sum(place - value for place, (_, value, _) in zip(places, ends, strict=True)) / len(ends)
    for place, (text, _, colour) in zip(places, ends, strict=True):
        spot = (1, place - moved)
        axes.annotate(text, spot, (6, 0), ("axes fraction", "data"), "offset points", color=colour, va="center")


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()


def _warm_up_and_cool_down(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    def factor(step: int) -> float:
        done = step / max(1, steps)
        return min(1.0, 10 * done + 0.05) * (0.5 + 0.5 * math.cos(math.pi * done))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _when_to_look(steps: int) -> set[int]:
    early = {round(steps * i / (4 * EARLY_LOOKS)) for i in range(EARLY_LOOKS)}
    return early | {round(steps * i / (4 * LATE_LOOKS)) for i in range(LATE_LOOKS, 4 * LATE_LOOKS + 1)}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m segue.lab.demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where the results go (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the data (%(default)s)")
    parser.add_argument("--steps", type=int, default=800, help="of the handover (%(default)s)")
    parser.add_argument("--teacher-steps", type=int, default=TEACHER_STEPS, help="of the teacher (%(default)s)")
    return parser.parse_args(arguments)


def _require_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "the demo was to draw a picture.", "matplotlib is not installed.", "pip install segue[lab]"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
