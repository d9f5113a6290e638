"""What a handover costs, beside the same model built by hand.

Command: make bench (or python benchmarks/cost.py); about four minutes on two cores.
Expected: no extra operations and no extra time once the students are alone; while both sides work, the operations of the
student-only step plus one forward of each teacher, and hardly more time than that.
Writes benchmarks/results/cost.json. Times are ratios taken in turn within one run: compare ratios, never milliseconds.
On a machine with other work to do, `--clock cpu --threads 1` counts processor time instead.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import segue
from segue.diagnostics.counting import flops, saved_bytes
from segue.lab.torchvision_cpu import declare_missing_operators

MODEL = "vit_tiny_patch16_224"
SITES = "blocks.*.attn"
BY_HAND = "built by hand"
TEACHERS = "teachers alone, no gradient"
BAR_ALONE = 1.02  # students alone, against the model built by hand
BAR_BLEND = 1.05  # blend, against its bound
BAR_IMPORT = 50.0  # milliseconds on top of torch

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

Step = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """A median of ratios taken round by round, with its 95 % interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, above: list[float], below: list[float]) -> Ratio:
        ratios = sorted(a / b for a, b in zip(above, below, strict=True))
        n = len(ratios)
        reach = math.ceil(1.96 * math.sqrt(n) / 2)  # order statistics around the median, by the binomial's normal limit
        return cls(statistics.median(ratios), ratios[max(0, n // 2 - reach)], ratios[min(n - 1, n // 2 + reach)])

    def over(self, bound: float) -> Ratio:
        return Ratio(self.median / bound, self.low / bound, self.high / bound)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


class Trainee:
    """A model with its optimizer: one training step, or its forward and loss alone."""

    def __init__(self, model: nn.Module, batch: tuple[Tensor, Tensor], handover: segue.Handover | None = None) -> None:
        self.model, self.batch, self.handover = model.train(), batch, handover
        trained = [p for p in model.parameters() if p.requires_grad] if handover is None else handover.parameters()
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6)

    def loss(self) -> Tensor:
        images, labels = self.batch
        loss = F.cross_entropy(self.model(images), labels)
        return loss if self.handover is None else loss + self.handover.aux_loss()

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.handover is not None:
            self.handover.step()

    def forward_and_backward(self) -> None:
        self.loss().backward()
        self.optimizer.zero_grad()

    def saved_bytes(self) -> int:
        return saved_bytes(self.loss, [*self.model.parameters(), *self.model.buffers()])


class ViewedTrainee(Trainee):
    """The students of a running handover, trained under `as_student()`."""

    def loss(self) -> Tensor:
        assert self.handover is not None
        with self.handover.as_student():
            return super().loss()


class BlendByHand(nn.Module):
    """The shortest blend that does the same: what a user would write for one model."""

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            teacher = self.teacher(*args, **kwargs)
        return torch.lerp(teacher, self.student(*args, **kwargs), 0.5)


def student_alone(teacher: nn.Module, student: nn.Module) -> nn.Module:
    """Join the two by leaving the teacher out."""
    return student


def main() -> None:
    """Measure everything, print the tables and save the numbers."""
    options = _options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    declare_missing_operators()
    import timm

    original = timm.create_model(MODEL, pretrained=False, num_classes=100)
    batch = torch.randn(options.batch, 3, 224, 224), torch.randint(100, (options.batch,))
    trainees = build(original, batch)
    teachers, output_bytes = teachers_alone(original, batch[0])
    for trainee in trainees.values():
        trainee.step()  # on the first forward a seam compares its two sides, whatever the plan says

    result: dict[str, Any] = {
        "machine": machine(),
        "model": MODEL,
        "batch": options.batch,
        "clock": options.clock,
        "import_ms": import_milliseconds(options.clock),
        "flops": {name: flops(trainee.forward_and_backward) for name, trainee in trainees.items()}
        | {TEACHERS: flops(teachers)},
        "saved_bytes": {name: trainee.saved_bytes() for name, trainee in trainees.items()},
        "output_bytes": output_bytes,
    }
    steps: dict[str, Step] = {name: trainee.step for name, trainee in trainees.items()}
    result |= times(steps | {TEACHERS: teachers}, options.seconds, CLOCKS[options.clock])
    print(report(result))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\n{options.out}")


def build(original: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Trainee]:
    """Make every variant from the same model; in all of them the students train and the rest is frozen."""

    def by_hand(join: Callable[[nn.Module, nn.Module], nn.Module]) -> Trainee:
        model = copy.deepcopy(original).requires_grad_(False)
        for site in segue.select(model, SITES):
            teacher = model.get_submodule(site.name)
            student = segue.students.Reinit()(teacher, site).requires_grad_(True)
            model.get_submodule(site.name.rpartition(".")[0]).attn = join(teacher, student)
        return Trainee(model, batch)

    def running(alpha: float, kind: type[Trainee] = Trainee, **settings: Any) -> Trainee:
        model = copy.deepcopy(original)
        plan = segue.Plan(sites=SITES, schedule=segue.schedules.Constant(alpha=alpha), **settings)
        return kind(model, batch, segue.replace_(model, plan, total_steps=10**6))

    def finalized() -> Trainee:
        model = running(0.0).handover.finalize_().requires_grad_(False)
        for site in segue.select(model, SITES):
            model.get_submodule(site.name).requires_grad_(True)
        return Trainee(model, batch)

    guidance = segue.losses.FeatureGuidance(schedule=segue.schedules.Constant(alpha=1.0))
    return {
        BY_HAND: by_hand(student_alone),
        "built by hand, again": by_hand(student_alone),  # shows the noise of the clock
        "student-only view": running(0.5, ViewedTrainee),
        "after takeover": running(0.0),
        "after finalize_()": finalized(),
        "blend by hand": by_hand(BlendByHand),
        "blend": running(0.5),
        "blend + DFG": running(0.5, guidance=guidance),
    }


def teachers_alone(original: nn.Module, images: Tensor) -> tuple[Step, int]:
    """Return a call of all teachers on what they see in the model, and the bytes of their outputs."""
    calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
    output_bytes = 0

    def note(teacher: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        nonlocal output_bytes
        calls.append((teacher, args, kwargs))
        output_bytes += output.nbytes

    model = copy.deepcopy(original).eval()
    hooks = [
        model.get_submodule(site.name).register_forward_hook(note, with_kwargs=True) for site in segue.select(model, SITES)
    ]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()

    @torch.no_grad()
    def run() -> None:
        for teacher, args, kwargs in calls:
            teacher(*args, **kwargs)

    return run, output_bytes


def times(steps: dict[str, Step], seconds: float, now: Callable[[], float]) -> dict[str, Any]:
    """Time the steps in turn, in another order every round, until the time is up; return medians and ratios."""
    for step in steps.values():
        step()
    clock: dict[str, list[float]] = {name: [] for name in steps}
    order, shuffle = list(steps), random.Random(0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(clock[BY_HAND]) < 10:
        shuffle.shuffle(order)
        for name in order:
            begun = now()
            steps[name]()
            clock[name].append(now() - begun)
    bound = [alone + teachers for alone, teachers in zip(clock[BY_HAND], clock[TEACHERS], strict=True)]
    return {
        "rounds": len(bound),
        "milliseconds": {name: 1000 * statistics.median(values) for name, values in clock.items()},
        "to_hand": {name: asdict(Ratio.of(values, clock[BY_HAND])) for name, values in clock.items()},
        "to_bound": {name: asdict(Ratio.of(values, bound)) for name, values in clock.items() if name.startswith("blend")},
    }


def import_milliseconds(clock: str, repeats: int = 9) -> float:
    """Time `import segue` on top of `import torch` in fresh processes."""
    now = f"time.{CLOCKS[clock].__name__}()"
    code = f"import time, torch; begun = {now}; import segue; print({now} - begun)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def once() -> float:
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        return 1000 * float(run.stdout)

    once()  # writes the bytecode, as an installation does
    return statistics.median(once() for _ in range(repeats))


def machine() -> dict[str, Any]:
    """Describe where the numbers come from."""
    import timm

    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),  # other work on the machine widens the intervals
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "segue": segue.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def report(result: dict[str, Any]) -> str:
    """Write the tables, each number beside its bar."""
    counted, saved, hand = result["flops"], result["saved_bytes"], result["flops"][BY_HAND]
    to_hand = {name: Ratio(**ratio) for name, ratio in result["to_hand"].items()}
    to_bound = {name: Ratio(**ratio) for name, ratio in result["to_bound"].items()}
    flop_bound = 1 + counted[TEACHERS] / hand
    where = result["machine"]
    lines = [
        f"{result['model']}, batch {result['batch']}, 12 attentions replaced, frozen backbone",
        f"{result['rounds']} rounds, {result['clock']} time, {where['cpu']}",
        f"{where['threads']} of {where['cores']} cores, load {where['load']}, torch {where['torch']}",
        "",
        "| step | time / hand-built (95 % interval) | FLOPs / hand-built | MB kept for backward | ms |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {to_hand[name]} | {counted[name] / hand:.4f} | {saved.get(name, 0) / 2**20:.1f} | {ms:.0f} |"
        for name, ms in result["milliseconds"].items()
    ]
    extra = {name: counted[name] - hand for name in ("student-only view", "after takeover", "after finalize_()")}
    blend = counted["blend"] - hand - counted[TEACHERS]
    kept, most = saved["blend"] - saved[BY_HAND], result["output_bytes"]
    imported = result["import_ms"]
    ratios = {f"time, {name}": (to_hand[name], BAR_ALONE) for name in extra}
    ratios["time, blend / (student-only step + teachers' forward)"] = (to_bound["blend"], BAR_BLEND)
    ratios[f"time, blend / FLOP bound ({flop_bound:.3f})"] = (to_hand["blend"].over(flop_bound), BAR_BLEND)
    bars = [
        *((f"extra FLOPs, {name}", f"{value:,}", "0", value == 0) for name, value in extra.items()),
        ("FLOPs of the blend beyond student-only + teachers' forward", f"{blend:,}", "0", blend == 0),
        ("bytes kept by the blend beyond student-only", f"{kept:,}", f"<= {most:,}", kept <= most),
        *((claim, str(ratio), f"<= {bar}", ratio.median <= bar) for claim, (ratio, bar) in ratios.items()),
        ("`import segue` on top of torch, ms", f"{imported:.0f}", f"< {BAR_IMPORT:.0f}", imported < BAR_IMPORT),
    ]
    lines += ["", "| claim | measured | bar | |", "|---|---|---|---|"]
    lines += [f"| {claim} | {measured} | {bar} | {'met' if met else 'MISSED'} |" for claim, measured, bar, met in bars]
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=180, help="of timing (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="images per step (%(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch (%(default)s)")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cost.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
