"""experiments/planner: rankings are compared with the truth as they should be, and a small study runs and resumes."""

import json
import sys

import pytest
import torch
from experiments.planner import __main__ as command
from experiments.planner import report
from experiments.planner.planners import random_scores, subsets

EVERYTHING = subsets(6)


def test_the_truth_itself_has_no_regret_and_its_opposite_the_most():
    known = {subset: float(sum(2**i for i in subset)) for subset in EVERYTHING}
    right = report.agreement(known, known)
    wrong = report.agreement({subset: -value for subset, value in known.items()}, known)
    assert (right["spearman"], right["within"]) == pytest.approx((1.0, 1.0))
    assert wrong["spearman"] == pytest.approx(-1.0)
    assert set(right["regret"].values()) == {0.0}
    assert wrong["regret"][1] == 31.0
    assert len(EVERYTHING) == len(set(EVERYTHING)) == 63


def test_random_scores_are_worse_on_average():
    known = {subset: float(sum(i for i in subset)) for subset in EVERYTHING}
    regrets = [report.agreement(random_scores(6, seed), known)["regret"][3] for seed in range(30)]
    assert sum(regrets) / 30 > 1.0


@pytest.mark.slow
def test_a_small_study_runs_and_resumes(tmp_path, monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["planner", *arguments, "--out", str(tmp_path)])
        threads = torch.get_num_threads()
        command.main()
        torch.set_num_threads(threads)

    call("truth", "drop", "--steps", "2", "--seeds", "1", "--most", "3")
    call("truth", "drop", "--steps", "2", "--seeds", "1", "--most", "2")
    lines = report.read(tmp_path / "drop_truth.jsonl")
    assert len({tuple(line["subset"]) for line in lines}) == len(lines) == 5
    assert lines[0]["subset"] == []
    assert lines[0]["kl"] == 0
    assert all(line["kl"] > 0 and line["flops"] > 0 for line in lines[1:])
    call("rank", "drop", "--seeds", "1", "--batches", "1", "--fit-steps", "1", "--subsets", "10")
    (ranks,) = (json.loads(line) for line in (tmp_path / "drop_ranks.jsonl").read_text().splitlines())
    assert {len(found["scores"]) for found in ranks["rankings"].values()} == {63}
    assert {"segue plan", "learned gates", "restore one", "leave one out", "local error", "uniform"} <= set(ranks["rankings"])
    call("report")
    assert "| segue plan |" in capsys.readouterr().out
    assert (tmp_path / "drop.png").exists()
