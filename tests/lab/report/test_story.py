"""What the report says first: the answer in three sentences, what differs, what happened, and where it was trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from segue import methods
from segue.lab.config import to_dict
from segue.lab.report import settings, tables
from segue.lab.report.answer import answer
from segue.lab.report.data import page_data
from segue.lab.report.summary import summarize
from segue.reporting.formatting import NOTHING
from segue.reporting.records import Result
from tests.helpers import tiny_runs
from tests.lab.report.saved_runs import changed, grid, run, scored, with_points


def test_the_answer_says_what_was_compared_how_it_ended_and_what_it_took():
    runs = [
        *[scored([0.1, 0.5, v], method="theseus", seed=s, sites=2) for s, v in enumerate((0.60, 0.61, 0.65, 0.62, 0.62))],
        *[scored([0.1, 0.8, v], method="dcr", seed=s, sites=2) for s, v in enumerate((0.80, 0.81, 0.79, 0.80, 0.82))],
    ]
    compared, ended, took = answer(summarize(runs))
    assert compared == "2 methods replace 2 modules of a trained model, in 40 steps with 5 seeds each."
    assert ended == (
        "Alone, the students of DCR end highest, at 80.4 ± 1.4 % accuracy (the teacher: 80.0 %); the best other method, "
        "Theseus, at 62.0 ± 2.3 %; the other is significantly lower."
    )
    blend = summarize(runs).groups[0].method("dcr").line.overall["blend"].mean[0]
    assert took.startswith("99 % of the teacher's accuracy is held first with DCR, after 1 GFLOPs (median); while teachers")
    assert took.endswith(f"the blend of DCR never falls below {100 * blend:.1f} %.")


def test_a_method_of_ours_is_never_called_a_baseline():
    runs = grid(methods=["dcr", "local_fit"], groups=["100 %"], seeds=5, evaluations=3, sites=1)
    summary = summarize(runs)
    said = [*answer(summary), *summary.groups[0].findings, tables.markdown(summary), tables.reading(summary)]
    assert not any("baseline" in text for text in said)
    assert "best other method" in tables.reading(summary)


def test_one_seed_names_no_best_and_is_one_sentence():
    runs = grid(groups=["100 %"], seeds=1, evaluations=3, sites=1)
    summary = summarize(runs)
    assert {method.standing["final"] for method in summary.groups[0].methods} == {"unknown"}
    assert answer(summary)[1].endswith("but with one seed any difference may be chance.")
    few = summarize([scored([0.1, 0.3, 0.3], method=method) for method in ("theseus", "dcr")])
    assert "No method holds 90 % of the teacher's accuracy to the end" in answer(few)[2]
    assert "of its seeds" not in tables.markdown(few)
    data = page_data(summary, runs, "x")["groups"][0]
    assert [part["rows"] for part in data["comparisons"]] == [[], []]
    assert {row["mark"] for row in data["rows"]} == {""}
    assert "Paired differences" not in tables.markdown(summary)
    assert sum("against the reference" in text for text in data["findings"]) == 0


def test_one_method_with_one_seed_is_compared_with_nothing():
    said = tables.markdown(summarize([scored([0.1, 0.3, 0.3], method="dcr")]))
    assert "No method" not in said
    assert "The method does not hold 90 % of the teacher's accuracy to the end" in said
    assert "half width" not in said
    assert "median" not in tables.markdown(summarize([scored([0.1, 0.8, 0.8], method="dcr")]))


def test_two_seeds_against_one_name_no_best():
    runs = [scored([0.1, 0.5, 0.6], method="theseus"), *[scored([0.1, 0.8, 0.8], method="dcr", seed=s) for s in (0, 1)]]
    (group,) = summarize(runs).groups
    assert {method.standing["final"] for method in group.methods} == {"unknown"}


def test_several_groups_and_runs_without_teachers_have_answers_too():
    several = answer(summarize(grid(methods=["theseus", "dcr"], seeds=2, evaluations=3, sites=1)))
    assert several[0].startswith("2 methods replace 1 module of a trained model in 3 settings")
    assert several[1].startswith("Best final accuracy by its mean: DCR in 100 %, 20 % and 5 %.")
    assert "falls deepest with" in several[2]
    alone = answer(summarize([run(method="student_only", evaluations=3, sites=1)]))
    assert alone[1].startswith("Alone, the students of Student only end at ")
    assert "blend" not in alone[2]
    assert answer(summarize([])) == []
    lost = changed(run(evaluations=3, sites=1), final={"accuracy": None})
    assert answer(summarize([lost]))[1] == "No run ended with a finite accuracy."


def with_config(method: str, **more: Any) -> Result:
    return run(method=method, config=to_dict(tiny_runs.config(method, **more)), evaluations=2, sites=1)


def test_settings_are_compared_and_only_differences_are_shown():
    group = summarize([with_config("dcr"), with_config("dcr_dfg"), with_config("theseus", batch=8)]).groups[0]
    most, theseus, dcr, dcr_dfg = settings.differences(group)
    assert (most[0], theseus[0], dcr[0], dcr_dfg[0]) == ("Most methods", "Theseus", "DCR", "DCR + DFG")
    assert dict(most[1])["plan.gate"] == "Blend()"
    assert dict(theseus[1])["plan.gate"] == "Bernoulli()"
    assert dict(theseus[1])["batch"] == "8"
    assert dict(dcr_dfg[1])["plan.guidance"].startswith("FeatureGuidance(weight=1")
    assert dcr[1] == []
    every = {path for _, pairs in (most, theseus, dcr, dcr_dfg) for path, _ in pairs}
    assert not {path for path in every if "seed" in path or path in ("label", "method", "recipe.lr", "task")}
    assert settings.differences(summarize([with_config("dcr")]).groups[0]) == []


def test_what_differs_inside_phases_is_not_cut_off():
    plan = to_dict(methods.local_fit("blocks.*.attn", split=4, reuse=3))
    fitted = with_config("dcr")
    fitted.run_info.config["plan"] = plan
    fitted = replace(fitted, run_info=replace(fitted.run_info, method="fit", label="Fit"))
    rows = settings.differences(summarize([fitted, with_config("theseus")]).groups[0])
    phases = dict(next(pairs for label, pairs in rows if label == "Fit"))["plan.phases"]
    assert "split=4, reuse=3" in phases
    assert "name=students alone" in phases
    assert len(phases) < settings.LONGEST


def test_events_of_the_guard_and_of_alpha_are_rows():
    undone = {
        "step": 33,
        "kind": "loss",
        "value": 9.5,
        "level": 1.25,
        "sites": ["blocks.0.attn"],
        "restored": 20,
        "retry": 1,
        "rate": 0.5,
    }
    broken = {
        "step": 40,
        "kind": "not finite",
        "value": None,
        "level": None,
        "sites": [],
        "restored": 20,
        "retry": 2,
        "rate": 0.25,
    }
    one = with_points(
        run(evaluations=3, sites=2, seed=4),
        lambda i, p: replace(p, events=[undone, broken] * (i == 1), rises={"blocks.1.attn": 7} if i == 2 else {}),
    )
    rows = settings.events(summarize([one, run(method="theseus", evaluations=3, sites=2)]).groups[0])
    assert [row[:2] for row in rows] == [["DCR", "4"]] * 3
    assert rows[0][2:] == ["33", "guard: loss 9.5, after 1.25", "blocks.0.attn", "back to step 20, rate x 0.5"]
    assert rows[1][2:] == ["40", "guard: not finite", NOTHING, "back to step 20, rate x 0.25"]
    assert rows[2][2:] == ["until 1000", "alpha rose in up to 7 steps", "blocks.1.attn", NOTHING]


def test_provenance_names_command_commit_versions_and_hardware():
    meta = {
        "versions": {"segue": "0.2.0", "torch": "2.13.0"},
        "hardware": {"machine": "x86_64", "system": "Linux", "cores": 2, "threads": 1, "gpus": ["A100", "A100"]},
        "commit": "0123456789abcdef",
        "command": "segue grid experiments/small",
        "begun": "2026-11-17T10:00:00+00:00",
        "finished": "2026-11-18T10:00:00+00:00",
    }
    runs = [replace(run(seed=seed, evaluations=2, sites=1), meta_info=meta) for seed in range(2)]
    assert settings.provenance(runs) == [
        ["Command", "segue grid experiments/small"],
        ["Commit", "0123456789abc"],
        ["Versions", "segue 0.2.0, torch 2.13.0"],
        ["Hardware", "2 x A100, Linux x86_64, 2 cores, 1 thread a process"],
        ["Trained", "2026-11-17 to 2026-11-18, 2 h 43 min in all"],
    ]
    other = replace(runs[0], meta_info=meta | {"commit": "fedcba9876543210"})
    assert settings.provenance([*runs, other])[1] == ["Commit", "0123456789abc; fedcba9876543"]
    assert settings.provenance([]) == []
