"""experiments/planner: rankings are compared with the truth as they should be, and a small study runs and resumes."""

import json
import sys

import pytest
import torch
from experiments.planner import __main__ as command
from experiments.planner import planners, report, studies
from experiments.planner.planners import random_scores, subsets

EVERYTHING = subsets(6)


def regrets(scores, known):
    """Return the mean regret at each size, as the report has it."""
    found = {}
    for size, chosen in report.choices(scores, known).items():
        least = min(known[subset] for subset in known if len(subset) == size)
        found[size] = sum(share * known[subset] for subset, share in chosen.items()) - least
    return found


def test_the_truth_itself_has_no_regret_and_its_opposite_the_most():
    known = {subset: float(sum(2**i for i in subset)) for subset in EVERYTHING}
    opposite = {subset: -value for subset, value in known.items()}
    assert report.correlation(known, known) == pytest.approx((1.0, 1.0))
    assert report.correlation(opposite, known) == pytest.approx((-1.0, -1.0))
    assert set(regrets(known, known).values()) == {0.0}
    assert regrets(opposite, known)[1] == 31.0
    assert sorted(regrets(known, known)) == [1, 2, 3, 4, 5]  # six of six sites leave no choice
    assert len(EVERYTHING) == len(set(EVERYTHING)) == 63


def test_who_does_not_distinguish_chooses_the_mean():
    known = {subset: float(sum(subset)) for subset in EVERYTHING}
    equal = dict.fromkeys(EVERYTHING, 1.0)
    assert regrets(equal, known)[1] == pytest.approx(2.5)
    assert report.correlation(equal, known) == (0.0, 0.0)


def test_random_scores_are_worse_on_average():
    known = {subset: float(sum(i for i in subset)) for subset in EVERYTHING}
    assert sum(regrets(random_scores(6, seed), known)[3] for seed in range(30)) / 30 > 1.0


def write(folder, noise, scores):
    lines = []
    for seed in range(2):
        draws = torch.randn(63, generator=torch.Generator().manual_seed(seed)).tolist()
        for subset, draw in zip(EVERYTHING, draws, strict=True):
            kl = sum(subset) + noise * draw
            lines.append({"subset": subset, "seed": seed, "steps": 1, "kl": kl, "seconds": 1.0})
    (folder / "drop_truth.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    keyed = {name: {" ".join(map(str, s)): f(s) for s in EVERYTHING} for name, f in scores.items()}
    rankings = {name: {"scores": each, "inputs": 1.0, "flops": 2.0} for name, each in keyed.items()}
    (folder / "drop_ranks.jsonl").write_text(
        f"{json.dumps({'seed': 0, 'training': 8.0, 'convert': 4.0, 'rankings': rankings})}\n"
    )


@pytest.mark.parametrize("noise", [0.01, 20.0])
def test_differences_between_planners_have_the_noise_of_the_trainings(tmp_path, noise):
    write(tmp_path, noise, {"segue plan": sum, "first layers": sum, "last layers": lambda subset: -sum(subset)})
    rows = {row["planner"]: row for row in report.compare(tmp_path, "drop", "kl")}
    assert rows["segue plan"]["mean regret"] == rows["first layers"]["mean regret"]
    assert rows["last layers"]["uncertain"] == pytest.approx(1.645 * noise / 5**0.5, rel=0.4)  # two seeds, five sizes
    assert "| 0.250 | 0.5000 |" in report.table(tmp_path, "drop")
    assert "2 complete seeds of 63 subsets" in report.about(tmp_path, "drop")


def test_differences_between_planners_have_the_noise_of_planning(tmp_path):
    write(tmp_path, 0.01, {"segue plan": sum, "first layers": sum})
    (line,) = report.read(tmp_path / "drop_ranks.jsonl")
    other = {"seed": 1, **line, "rankings": {**line["rankings"]}}
    scores = {" ".join(map(str, s)): -sum(s) for s in EVERYTHING}  # the second seed chooses the worst
    other["rankings"]["segue plan"] = {**line["rankings"]["segue plan"], "scores": scores}
    (tmp_path / "drop_ranks.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(other)}\n")
    row = next(row for row in report.compare(tmp_path, "drop", "kl") if row["planner"] == "segue plan")
    good, bad = row["by seed"]
    assert good == pytest.approx(0, abs=0.1)
    assert row["mean regret"] == pytest.approx((good + bad) / 2)
    assert row["uncertain"] == pytest.approx(1.645 * (bad - good) / 2, rel=0.01)
    assert f"({good:.4f} to {bad:.4f})" in report.table(tmp_path, "drop")


@pytest.mark.slow
def test_a_small_study_runs_and_resumes(tmp_path, monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["planner", *arguments, "--out", str(tmp_path)])
        threads = torch.get_num_threads()
        command.main()
        torch.set_num_threads(threads)

    monkeypatch.setattr(studies, "DIGITS_STEPS", 40)
    monkeypatch.setattr(planners, "GATE_STEPS", 4)
    call("truth", "drop", "--steps", "2", "--seeds", "1", "--most", "3")
    call("truth", "drop", "--steps", "2", "--seeds", "1", "--most", "2")
    lines = report.read(tmp_path / "drop_truth.jsonl")
    assert len({tuple(line["subset"]) for line in lines}) == len(lines) == 5
    assert lines[0]["subset"] == []
    assert lines[0]["kl"] == 0
    assert all(line["kl"] > 0 for line in lines[1:])
    call("rank", "drop", "--steps", "2", "--seeds", "1", "--fit-steps", "1", "--subsets", "10")
    (ranks,) = (json.loads(line) for line in (tmp_path / "drop_ranks.jsonl").read_text().splitlines())
    assert {len(found["scores"]) for found in ranks["rankings"].values()} == {63}
    assert {"segue plan", "learned gates", "restore one", "leave one out", "local error", "uniform"} <= set(ranks["rankings"])
    call("report", "--figures", str(tmp_path))
    assert "| **segue plan** |" in capsys.readouterr().out
    assert (tmp_path / "planner-drop.png").exists()
