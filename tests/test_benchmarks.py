"""The benchmarks: their statistics, their wording both ways, and the whole command on a tiny model. No time is asserted."""

import copy
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import machine, page, peer, performance, replaced, saturation, step_time, whole_run
from benchmarks.bars import Bar
from benchmarks.settings import smoke
from benchmarks.timing import Ratio, outer_place, rounds
from benchmarks.trainees import (
    AGAIN,
    BLEND,
    BLEND_BY_HAND,
    BY_HAND,
    FINALIZED,
    GUIDED,
    KL,
    TAKEOVER,
    TEACHERS,
    THESEUS,
    TORCHDISTILL,
    VIEW,
    Bench,
)
from scipy.stats import binom

ROOT = Path(__file__).parent.parent
STEPS = {BY_HAND: 100, AGAIN: 100, VIEW: 100, TAKEOVER: 101, FINALIZED: 100, BLEND_BY_HAND: 118, BLEND: 118, GUIDED: 122}
STEPS |= {THESEUS: 95, KL: 145, TORCHDISTILL: 146, TEACHERS: 18}


def times(milliseconds: dict[str, float], scale: float = 1.0) -> dict[str, list[float]]:
    """Make eight rounds without noise, each slower than the one before, as on a machine that others use."""
    return {name: [scale * value * (1 + place / 10) for place in range(8)] for name, value in milliseconds.items()}


def recorded(blend: float = 118, takeover: float = 101) -> dict:
    """Make the record of a small run, with the given milliseconds for a blend and after takeover."""
    about = {"when": {"date": "2026-01-01 12:00", "load": [0.5, 0.4, 0.3]}, "minutes": 25, "seconds": 1.0}
    flops = {name: 118 if name in (BLEND, BLEND_BY_HAND, GUIDED) else 100 for name in STEPS} | {KL: 145, TEACHERS: 18}
    steps = {"batch": 8, "sites": 12, "coins": 3, "temperature": 4.0, "loss_difference": 1e-7, "missing": {}, "flops": flops}
    steps["milliseconds"] = times(STEPS | {BLEND: blend, TAKEOVER: takeover})
    kinds = {whole_run.BOTH: 200, whole_run.ALONE: 800}
    run = {"batch": 4, "steps": 30, "planned_steps": 1000, "planned_kinds": kinds, "kinds": kinds, "missing": {}}
    dcr = (blend + 4 * takeover) / 5
    run["milliseconds"] = times({BY_HAND: 100, whole_run.DCR: dcr, whole_run.DCR_DFG: dcr, KL: 145, TORCHDISTILL: 146})
    operators = {name: {"aten::mm": float(STEPS[name])} for name in (BY_HAND, TAKEOVER, BLEND, TEACHERS)}
    chain = {"chain by hand": [1.0], "closed seams, without handover.step()": [1.1], "closed seams": [1.2]}
    chain |= {"blends by hand": [2.0], "open seams": [2.5]}
    profile = {"batch": 8, "sites": 12, "seams": 10, "operators": operators, "chain_milliseconds": chain}
    measured = {"steps": steps, "run": run, "profile": profile, "import": {"milliseconds": [30.0, 31.0, 99.0]}}
    packages = {"torch": "2", "timm": "1", "torchdistill": None, "segue": "0"}
    here = {"cpu": "A", "cores": 2, "threads": 2, "memory_gb": 8, "system": "B", "python": "3", "compiler": None}
    return {
        "machine": here | {"packages": packages},
        "settings": {"model": "vit"},
        "measurements": {name: about | result for name, result in measured.items()},
    }


@pytest.mark.parametrize("n", [1, 2, 5, 6, 9, 10, 17, 50, 101, 400])
def test_the_interval_is_the_exact_one_of_the_binomial(n):
    assert outer_place(n) == max((place for place in range(n) if binom.cdf(place, n, 0.5) <= 0.025), default=0)


def test_the_interval_covers_the_true_median():
    draw = random.Random(0)
    samples = [[draw.lognormvariate(0, 0.2) for _ in range(15)] for _ in range(2000)]
    covered = [ratio.low <= 1 <= ratio.high for ratio in (Ratio.of(sample, [1.0] * 15) for sample in samples)]
    assert 0.95 <= statistics.mean(covered) <= 0.98


def test_ratios_are_taken_within_a_round():
    assert Ratio.of([2, 20, 200], [1, 10, 100]) == Ratio(2, 2, 2)


def test_rounds_take_turns_and_keep_groups_together():
    calls = []
    steps = {name: lambda name=name: calls.append(name) for name in "abcd"}
    clock = rounds(steps, 0, least=20, groups=["ab", "cd"], repeats={"d": 3})
    assert {name: len(values) for name, values in clock.items()} == dict.fromkeys("abcd", 20)
    counted = calls[4:]  # the first calls warm up
    assert (counted.count("a"), counted.count("d")) == (20, 60)
    firsts = {tuple(dict.fromkeys(counted[i : i + 6])) for i in range(0, len(counted), 6)}
    assert len(firsts) > 2
    assert all({*order[:2]} in ({"a", "b"}, {"c", "d"}) for order in firsts)


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (Ratio(1.01, 1.00, 1.02), "met"),
        (Ratio(1.01, 1.00, 1.05), "met, but the interval reaches beyond"),
        (Ratio(1.03, 1.01, 1.05), "missed, but within the interval"),
        (Ratio(1.05, 1.04, 1.06), "missed"),
    ],
)
def test_a_bar_says_what_the_noise_allows(ratio, verdict):
    assert Bar.of_ratio("x", ratio, 1.02).verdict == verdict


def test_a_good_run_meets_its_bars():
    text = page.render(recorded())
    assert "11 of 11 bars are met." in text
    assert "| step time, after takeover / built by hand | 1.010 (1.010 to 1.010) | at most 1.02 | met |" in text
    assert "| DCR blend | 1.180 (1.180 to 1.180) | 1.180 | 159 |" in text
    assert "A blend step costs less than one of our KL distillation: 0.814" in text
    assert "it costs 1.044 (1.044 to 1.044) x student-only; by operations alone 1.036 x." in text
    assert "| closed seam, with `handover.step()` | 20.0 (20.0 to 20.0) |" in text
    assert "Missed" not in text


def test_a_bad_run_says_so_and_brings_its_reasons():
    text = page.render(recorded(blend=200, takeover=120))
    assert "| step time, after takeover / built by hand | 1.200 (1.200 to 1.200) | at most 1.02 | missed |" in text
    assert "6 of 11 bars are met. Missed: step time, after takeover" in text
    assert "A blend step costs more than one of our KL distillation: 1.379" in text
    assert "- Noise: the same hand-built model, built twice, differs by 1.000" in text
    assert "- Operators, by the [profile](#profile): +18.0 ms from student-only to a blend" in text


def test_what_was_not_installed_is_said_and_not_counted_as_met():
    saved = recorded()
    for name in ("steps", "run"):
        saved["measurements"][name]["missing"] = {TORCHDISTILL: "torchdistill is not installed"}
        del saved["measurements"][name]["milliseconds"][TORCHDISTILL]
    text = page.render(saved)
    assert f"| {TORCHDISTILL} | not measured: torchdistill is not installed | | |" in text
    assert "10 of 11 bars are met. 1 could not be measured here." in text


def sizes(rates: list[float], blend: list[float]) -> list[dict]:
    """Make points of growing batches with the given GFLOP/s and time ratios; by operations a blend is 1.2."""
    return [
        {
            "batch": 2**i,
            "flops": {BY_HAND: 1e9, BLEND: 1.2e9, KL: 1.5e9},
            "milliseconds": {BY_HAND: [1e3 / rate] * 6, BLEND: [1e3 * ratio / rate] * 6, KL: [1.5e3 / rate] * 6},
        }
        for i, (rate, ratio) in enumerate(zip(rates, blend, strict=True))
    ]


def test_saturation_and_crossover():
    points = sizes([10, 20, 30, 31, 30], [1.5, 1.4, 1.22, 1.2, 1.19])
    assert (saturation.saturated_from(points), saturation.follows_from(points, BLEND)) == (2, 2)
    (said,) = saturation.reading(points, "batch")
    assert said.startswith(
        "Saturated from batch 4 on. DCR blend: 1.40 to 1.50 below saturation, 1.19 to 1.22 from there on; within 5 %"
    )
    assert "By the medians the blend is the dearer of the two at batch 1." in said
    rising = sizes([10, 20, 30], [1.5, 1.5, 1.5])
    assert (saturation.saturated_from(rising), saturation.follows_from(rising, BLEND)) == (None, None)
    assert saturation.reading(rising, "batch")[0].startswith("The rate still rises at batch 4: saturation was not reached.")


def test_break_even_is_where_the_replaced_modules_cost_a_whole_forward():
    point = {"count": 4, "flops": {TEACHERS: 40, replaced.FULL: 120}}
    assert replaced.break_even({"points": [point]}) == 12


def test_a_plan_tells_the_kinds_of_its_steps():
    assert whole_run.kinds(Bench(smoke(), 2), 1000) == {whole_run.BOTH: 200, whole_run.ALONE: 800}


def test_measurements_of_two_machines_are_not_mixed(tmp_path):
    earlier = performance._begun(None, smoke(), tmp_path)
    assert performance._begun(copy.deepcopy(earlier), smoke(), tmp_path) == earlier
    earlier["machine"]["cpu"] = "another"
    with pytest.raises(SystemExit, match="measured elsewhere"):
        performance._begun(earlier, smoke(), tmp_path)


def test_the_page_is_what_the_saved_numbers_render_to():
    saved = json.loads((ROOT / "benchmarks" / "results" / "performance.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs" / "performance.md").read_text(encoding="utf-8") == page.render(saved)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(not machine.installed("torchdistill"), reason="torchdistill is not installed")
def test_torchdistill_computes_our_loss_and_our_gradients():
    bench = Bench(smoke(), 2)
    ours = bench.distillation()
    ours.step()  # the first forward compares the two sides
    theirs = peer.box_of_copies(bench, ours)
    assert theirs.flops() == step_time.step_flops(KL, ours)
    ours.loss().backward()
    theirs.loss().backward()
    gradients = [[p.grad for p in trainee.model.parameters() if p.grad is not None] for trainee in (ours, theirs)]
    assert len(gradients[0]) > 4
    torch.testing.assert_close(*gradients)


def test_the_whole_command_runs_also_without_torchdistill(tmp_path):
    without = "import sys; sys.modules['torchdistill'] = None; from benchmarks.performance import main; main()"
    out = ["--results", tmp_path / "p.json", "--page", tmp_path / "performance.md"]
    command = [sys.executable, "-c", without, "--smoke", "--threads", "1", *out]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr
    saved = json.loads((tmp_path / "p.json").read_text(encoding="utf-8"))
    assert set(saved["measurements"]) == set(performance.MEASUREMENTS)
    text = (tmp_path / "performance.md").read_text(encoding="utf-8")
    assert text == page.render(saved)
    assert text.count(f"| {TORCHDISTILL} | not measured: ") == 4  # steps, compiled, run, memory
    assert "torchdistill is not installed" in text
    figures = {path.name for path in (tmp_path / "figures").iterdir()}
    assert figures == {f"performance-{name}.png" for name in ("steps", "replaced", "saturation")}
    assert all(f"figures/{name}" in text for name in figures)
