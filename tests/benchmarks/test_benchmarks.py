"""The benchmarks: their statistics, their wording both ways, and the whole command on a tiny model. No time is asserted."""

import copy
import dataclasses
import json
import math
import random
import statistics
from pathlib import Path

import pytest
import timm
import torch
from benchmarks import (
    compiled,
    decoding,
    guarding,
    local_pass,
    machine,
    mixer_figures,
    mixers,
    page,
    peer,
    performance,
    replaced,
    saturation,
    skipping,
    step_time,
    whole_run,
)
from benchmarks.bars import Bar
from benchmarks.settings import EACH, MINUTES, Settings, smoke
from benchmarks.timing import Ratio, outer_place, rounds
from benchmarks.trainees import (
    AGAIN,
    BLEND,
    BLEND_BY_HAND,
    BY_HAND,
    FINALIZED,
    GUIDED,
    GUMBEL,
    KL,
    TAKEOVER,
    TEACHERS,
    THESEUS,
    TORCHDISTILL,
    VIEW,
    Bench,
)
from scipy.stats import binom

from tests.helpers.processes import run_python

ROOT = Path(__file__).parents[2]
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
    assert "By the medians the blend is the more expensive of the two at batch 1." in said
    rising = sizes([10, 20, 30], [1.5, 1.5, 1.5])
    assert (saturation.saturated_from(rising), saturation.follows_from(rising, BLEND)) == (None, None)
    assert saturation.reading(rising, "batch")[0].startswith("The rate still rises at batch 4: saturation was not reached.")


def test_break_even_is_where_the_replaced_modules_cost_a_whole_forward():
    point = {"count": 4, "flops": {TEACHERS: 40, replaced.FULL: 120}}
    assert replaced.break_even({"points": [point]}) == 12


def test_skipping_copies_the_statistics_of_batch_norm_and_nothing_of_a_transformer():
    result = skipping.measure(smoke())
    norms = [m for m in timm.create_model(smoke().norm_model).modules() if isinstance(m, torch.nn.BatchNorm2d)]
    statistics_of_norms = sum(8 * norm.num_features + 8 for norm in norms)  # two float32 per feature, and a count
    assert [point["copied"] for point in result["points"]] == [statistics_of_norms, 0]
    assert all(len(times) == smoke().pairs for point in result["points"] for times in point["milliseconds"].values())
    rows = [line for line in skipping.section(result) if line.startswith(("| resnet18", "| vit_tiny"))]
    assert len(rows) == 2
    assert f"{statistics_of_norms:,} bytes" in rows[0]
    assert Settings().pairs == 200


def test_a_guard_copies_the_weights_that_train_and_their_moments():
    settings = dataclasses.replace(smoke(), pairs=25)  # more than there are from one copy to the next
    result = guarding.measure(settings)
    students, everything = (point["copied"] for point in result["points"])
    model = timm.create_model(smoke().model, num_classes=smoke().classes, img_size=smoke().image, **smoke().model_options)
    parameters = list(model.parameters())
    assert everything == 4 * (3 * sum(p.numel() for p in parameters) + len(parameters))  # and AdamW's count of steps
    assert 0 < students < everything
    assert all(len(times) == 25 for point in result["points"] for times in point["milliseconds"].values())
    rows = [line for line in guarding.section(result) if "bytes, 1 in 20" in line]
    assert len(rows) == 2
    assert f"{students:,} bytes" in rows[0]


def test_a_local_pass_is_timed_beside_a_student_only_step_and_counted():
    result = local_pass.measure(smoke())
    assert list(result["milliseconds"]) == [BY_HAND, local_pass.FORWARD, "a pass in 1 update"]  # of two samples
    assert 0 < result["operations"] < 1
    assert sum(line.startswith("| ") for line in local_pass.section(result)) == 4


def test_a_plan_tells_the_kinds_of_its_steps():
    assert whole_run.kinds(Bench(smoke(), 2), 1000) == {whole_run.BOTH: 200, whole_run.ALONE: 800}


def test_measurements_of_two_machines_are_not_mixed(tmp_path):
    earlier = performance._begun(None, smoke(), tmp_path)
    assert performance._begun(copy.deepcopy(earlier), smoke(), tmp_path) == earlier
    earlier["machine"]["cpu"] = "another"
    with pytest.raises(SystemExit, match=r"measured on another machine or with other settings \(cpu differ\)"):
        performance._begun(earlier, smoke(), tmp_path)


def test_sizes_and_versions_may_differ_within_a_page_but_the_model_may_not(tmp_path):
    earlier = performance._begun(None, smoke(), tmp_path)
    earlier["machine"]["packages"]["segue"] = "0.0.1"
    longer = dataclasses.replace(smoke(), images=(16, 32, 48), counts=(1,), batches=(4,), minutes=3.0, mixer_tokens=(64, 128))
    assert performance._begun(copy.deepcopy(earlier), longer, tmp_path) == earlier
    with pytest.raises(SystemExit, match=r"\(classes differ\)"):
        performance._begun(earlier, dataclasses.replace(smoke(), classes=7), tmp_path)


def test_an_earlier_record_with_all_its_settings_can_be_continued(tmp_path):
    earlier = performance._begun(None, smoke(), tmp_path)
    old = earlier | {"settings": {**dataclasses.asdict(smoke()), **earlier["settings"]}}
    assert performance._begun(old, smoke(), tmp_path) == earlier


def test_a_section_says_when_and_how_it_was_measured():
    saved = recorded()
    saved["measurements"]["steps"] |= {"segue": "9.9", "minutes": 3}
    text = page.render(saved)
    assert "`--only steps`: 2026-01-01 12:00, load 0.50, 1 s, `--minutes 3`, segue 9.9." in text
    assert "`--only run`: 2026-01-01 12:00, load 0.50, 1 s, `--minutes 25`." in text


def grown(exponent: float, at_8k: float, causal: float | None = None) -> dict:
    """Make a record of mixers: softmax is quadratic and takes 100 ms at 8192 tokens, all mixers grow with one exponent."""
    points = []
    for tokens in (1024, 2048, 4096, 8192, 16384):
        names = [mixers.SOFTMAX, mixers.SOFTMAX + mixers.CAUSAL] if tokens <= 8192 else []
        spent = dict.fromkeys(names, 100 * (tokens / 8192) ** 2)
        spent |= dict.fromkeys(mixers.OPERATORS, at_8k * (tokens / 8192) ** exponent)
        spent |= {"window" + mixers.CAUSAL: (causal or at_8k) * (tokens / 8192) ** exponent}
        size = {name: int(1000 * tokens**exponent) for name in spent}
        took = {kind: times(spent) for kind in mixers.PASSES}
        points.append({"tokens": tokens, "saved": size, "peak": size, "milliseconds": took})
    wall = {"threads": 2, "milliseconds": points[3]["milliseconds"]}
    return {"batch": 1, "heads": 4, "head_size": 64, "judged_at": 8192, "keeps_memory": True, "points": points, "wall": wall}


def test_mixers_are_judged_by_their_worst():
    assert [bar.verdict for bar in mixers.bars(grown(1.0, 10))] == ["met"] * 5
    bars = mixers.bars(grown(1.5, 10, causal=200))
    assert [bar.verdict for bar in bars] == ["missed"] * 5
    assert bars[0].measured == "1.500 (1.500 to 1.500)"
    assert (
        bars[3].claim
        == f"time at 8192 tokens / softmax, forward: the worst of {len(mixers.OPERATORS) + 1} mixers (window, causal)"
    )
    assert bars[3].measured == "2.000 (2.000 to 2.000)"


def test_exponent_speed_up_and_crossover_of_mixers():
    result = grown(1.0, 40)
    assert mixers.exponent(result, mixers.SOFTMAX, mixers.FORWARD).median == pytest.approx(2)
    assert mixers.memory_exponent(result, "window") == pytest.approx(1)
    assert mixers.fourier_exponent(result) == pytest.approx(1.12, abs=0.005)
    assert mixers.wins_from(result, "window", mixers.FORWARD) == "4096"  # 20 ms against 25 ms; at 2048 10 against 6.25
    assert mixers.wins_from(grown(1.0, 10), "window", mixers.FORWARD) == "1024 or less"
    assert mixers.wins_from(grown(1.0, 400), "window", mixers.FORWARD) == "never"
    row = next(line for line in mixers.section(result) if line.startswith("| window |"))
    assert row == "| window | 1.00 (1.00 to 1.00) | 1.00 (1.00 to 1.00) | 2.5 (2.5 to 2.5) | 2.5 (2.5 to 2.5) | 4096 | 4096 |"


def test_every_mixer_has_a_look_of_its_own():
    assert {*mixer_figures.LOOKS} == {mixers.SOFTMAX, mixers.UNFUSED, decoding.STATIC, *mixers.OPERATORS}
    assert len({*mixer_figures.LOOKS.values()}) == len(mixer_figures.LOOKS)


def test_names_are_moved_apart():
    assert mixer_figures.spread([0.1, 0.1, 0.5], 0.2) == pytest.approx([0.1, 0.3, 0.5])
    assert mixer_figures.spread([0.9, 1.0, 1.0], 0.2) == pytest.approx([0.6, 0.8, 1.0])


def decoded(student: float, growth: int = 0) -> dict:
    """Make a record of decoding: the original takes 1 ms per 1024 tokens (static: 0.8 ms), students always the same."""
    points = []
    for tokens in (512, 4096, 8192):
        spent = {decoding.SOFTMAX: tokens / 1024, decoding.STATIC: 0.8 * tokens / 1024} | dict.fromkeys(
            decoding.OPERATORS, student
        )
        size = dict.fromkeys(decoding.ORIGINALS, 1000 * tokens) | dict.fromkeys(decoding.OPERATORS, 5000)
        size["window"] += growth * tokens
        points.append({"tokens": tokens, "bytes": size, "milliseconds": times(spent)})
    wall = {"threads": 2, "milliseconds": points[1]["milliseconds"]}
    return {"model": smoke().decoder, "parameters": 2e6, "transformers": "5", "judged_at": 4096, "points": points, "wall": wall}


def test_decoding_is_judged_against_the_faster_original():
    assert [bar.verdict for bar in decoding.bars(decoded(0.4))] == ["met", "met", "met"]
    assert [bar.verdict for bar in decoding.bars(decoded(1.6))] == ["met", "missed", "met"]  # at 512 tokens it takes 0.4 ms
    speed, _, memory = decoding.bars(decoded(3.6, growth=2))  # faster than 4 ms, slower than 3.2
    assert (speed.verdict, speed.measured) == ("missed", "1.125 (1.125 to 1.125)")
    assert (memory.verdict, memory.measured) == ("missed", "15,360")
    text = "\n".join(decoding.section(decoded(1.6)))
    assert "| window | 0.3 (0.3 to 0.3) | 2.5 (2.5 to 2.5) | 5.0 (5.0 to 5.0) |" in text
    assert "window, from 4096 tokens on" in text
    assert "window, from 8192 tokens on" in "\n".join(decoding.section(decoded(3.6)))


def test_at_the_shortest_context_the_linear_kinds_are_judged():
    record = decoded(0.4)
    spent = record["points"][0]["milliseconds"]
    spent |= times({"window": 9.0})
    assert decoding.bars(record)[1].verdict == "met"  # a window alone is softmax
    spent |= times({"Performer": 0.5})
    judged = decoding.bars(record)[1]
    assert (judged.verdict, judged.measured) == ("missed", "1.250 (1.250 to 1.250)")
    assert judged.claim.endswith(f"(softmax, static cache): the slowest of {len(decoding.LINEAR)} linear kinds (Performer)")


@torch.no_grad()
def test_a_moment_of_decoding_does_not_pass():
    """However often the next token is decoded, it is decoded at the same length, by the original also from the same state."""
    for (tokens, name), moment in decoding.reading(smoke()).items():
        logits = []
        moment.model.register_forward_hook(lambda _model, _args, output, logits=logits: logits.append(output.logits))
        for _ in range(3):
            moment.step()
        assert moment.cache.get_seq_length() == tokens + 1, name
        if name in decoding.ORIGINALS:
            torch.testing.assert_close(logits[1:], logits[:1] * 2, rtol=0, atol=0)
        else:
            assert all(x.isfinite().all() for x in logits)
        if name != decoding.STATIC:  # which is full
            moment.model(moment.token, past_key_values=moment.cache, use_cache=True)
            assert not torch.equal(logits[0], logits[3])


def test_theseus_is_compiled_after_everything_that_has_a_bar():
    assert list(compiled.builders(smoke(), {}))[-3:] == [FINALIZED, THESEUS, GUMBEL]


def test_settings_spread_the_minutes():
    assert Settings(minutes=MINUTES / 2).seconds("mixers") == 30 * EACH["mixers"]
    assert math.fsum(EACH.values()) <= MINUTES


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


@pytest.mark.processes
def test_the_whole_command_runs_also_without_torchdistill(tmp_path):
    without = "import sys; sys.modules['torchdistill'] = None; from benchmarks.performance import main; main()"
    out = ["--results", tmp_path / "p.json", "--page", tmp_path / "performance.md"]
    run = run_python("-c", without, "--smoke", "--threads", "1", *out, cwd=ROOT)
    assert "Warning" not in run.stderr
    saved = json.loads((tmp_path / "p.json").read_text(encoding="utf-8"))
    assert set(saved["measurements"]) == set(performance.MEASUREMENTS)
    text = (tmp_path / "performance.md").read_text(encoding="utf-8")
    assert text == page.render(saved)
    assert text.count(f"| {TORCHDISTILL} | not measured: ") == 4  # steps, compiled, run, memory
    assert "torchdistill is not installed" in text
    figures = {path.name for path in (tmp_path / "figures").iterdir()}
    assert figures == {
        f"performance-{name}.png" for name in ("steps", "replaced", "saturation", "mixers-time", "mixers-memory", "decoding")
    }
    assert all(f"figures/{name}" in text for name in figures)
