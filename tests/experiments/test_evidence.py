"""The evidence: arms, settings and protocols, and a ledger of claims that is what the committed results say."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from experiments.evidence import claims, judges, keep, measures, page, tables
from experiments.evidence.arms import OURS, OUTSIDE, Start, eight, further
from experiments.evidence.judges import Evidence, Finding
from experiments.evidence.runs import ONE_RATE, runs
from experiments.evidence.settings import SETTINGS
from experiments.recipes import runs as recipes
from PIL import Image

from segue import methods
from segue.cli.arguments import name_values
from segue.errors import ConfigError
from segue.lab.config import config_hash
from segue.lab.experiment import Experiment
from segue.lab.report.summary import area, summarize
from segue.lab.tune import axes_of, tuned
from segue.phases import Rates
from segue.reporting import records
from tests.helpers.processes import ROOT

NUMBER = re.compile(r"\d")


@pytest.fixture(scope="module")
def evidence():
    return Evidence.read()


@pytest.fixture(scope="module")
def digits(evidence):
    (place,) = (place for place in evidence.places if place.setting == "digits")
    return place


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_has_the_eight_arms_with_five_seeds(setting):
    found = Experiment("experiments/evidence/runs.py", {"setting": setting}).runs()
    groups = {run.group for run in found}
    assert len(found) == 5 * 8 * len(groups)
    assert [run.seed for run in found] == sorted(run.seed for run in found)  # an interrupted grid has complete seeds
    for group in groups:
        first, *others = [run for run in found if run.group == group]
        for run in others:
            assert (run.task, run.teacher, run.batch, run.data_fraction) == (
                *(first.task, first.teacher, first.batch),
                first.data_fraction,
            )
            longer = SETTINGS[setting]().cases[0].start.outside if run.method not in OUTSIDE else 1.0  # the first is outside
            assert run.recipe.steps == round(first.recipe.steps / longer)
            assert run.reference == "student_only"
            if longer == 1:
                assert run.evaluations == first.evaluations
    assert not re.search(r'"/|~', json.dumps([repr(run) for run in found[:16]]))  # no path of a machine


def test_the_arms_are_those_of_the_issue_and_the_shipped_recipe_is_one_of_them():
    names = [arm.name for arm in (*eight(Start(lr=1e-3)), *further(Start(lr=1e-3)))]
    assert len(names) == len(set(names)) == 26
    assert {*OUTSIDE, OURS} <= set(names)
    arm = next(arm for arm in eight(Start(lr=4e-3)) if arm.name == OURS)
    assert arm.plan(sites="blocks.*.attn") == methods.local_fit(sites="blocks.*.attn")


def test_without_labels_a_distillation_has_no_weight_to_tune():
    found = {run.method: [axis.path for axis in axes_of(run)] for run in runs("stories", seeds=1)}
    assert found["distillation"] == ["recipe.lr.new", "recipe.lr.copied"]
    assert "plan.distill.weight" not in found["halo"]
    assert "plan.guidance.weight" in found["fit_adaptive"]


def test_one_rate_for_all_is_that_of_student_only_training(tmp_path):
    path = tmp_path / "tuned.json"
    choice = {"settings": {"recipe.lr": 0.5}, "trials": 6, "seeds": 1, "hold_out": 9, "score": 0.5}
    known = [{"method": name, "group": "all", "choice": choice} for name in ("student_only", "dcr")]
    known[1]["choice"] = {**choice, "settings": {"recipe.lr": 0.25}}
    path.write_text(json.dumps({"format": 1, "methods": known}))
    found = runs("digits", seeds=1, one_rate=str(path))
    assert {run.group for run in found} == {ONE_RATE}
    assert {run.recipe.lr for run in found} == {0.5}
    assert {phase.lr for run in found for phase in run.plan.phases} == {None}


def test_a_run_that_has_the_machine_for_itself_is_the_same_run():
    (shared,), (alone,) = (runs("digits", seeds=1, only="dcr", alone=value) for value in (False, True))
    assert (shared.alone, alone.alone) == (False, True)
    assert config_hash(shared) == config_hash(alone)


def test_variances_are_measured_where_a_claim_needs_them():
    measured = {run.method for run in runs("digits", "further", seeds=1) if run.diagnostics}
    assert measured == {"theseus_gumbel"}
    measured = {run.method for run in runs("digits", seeds=1) if run.diagnostics}
    assert measured == {"student_only", "distillation", "dcr_dfg", "dcr", "theseus"}
    assert not any(run.diagnostics for run in runs("fashion", "further", seeds=1))


def test_a_wrong_setting_is_named():
    with pytest.raises(ConfigError, match="there is no setting 'cifar10'"):
        runs("cifar10")
    with pytest.raises(ConfigError, match="there is no arm 'hallo'"):
        runs("digits", only="hallo,dcr")


def test_linear_attention_has_a_rate_for_each_kind_of_parameter():
    found = [run for run in runs("minilm", seeds=1) if run.group == "Linear attention"]
    assert all(isinstance(run.recipe.lr, Rates) for run in found)


def test_committed_results_are_of_the_configurations_of_today():
    place = ROOT / "experiments" / "recipes"
    expected = {run.name: config_hash(run) for run in tuned(Experiment(recipes.__file__), place / "tuned.json").runs()}
    found = {result.run_info.name: result.run_info.config_hash for result in records.read_all(place / "results")}
    assert found == expected


@pytest.mark.parametrize("setting", [name for name in SETTINGS if judges.FOLDERS[name].is_dir()])
def test_committed_evidence_is_of_the_configurations_of_today(setting):
    expected = {}
    for path in sorted((ROOT / "experiments" / "evidence" / "tuned").glob(f"{setting}*.json")):
        known = tuned(Experiment(**{name: records.read_json(path, name)[name] for name in ("place", "options")}), path)
        expected |= {run.name: config_hash(run) for run in known.runs() if run.choice is not None}
    found = {result.run_info.name: result.run_info.config_hash for result in records.read_all(judges.FOLDERS[setting])}
    assert found.items() <= expected.items()


@pytest.mark.skipif(not judges.FOLDERS[judges.PROTOCOL].is_dir(), reason="not measured yet")
def test_committed_runs_at_one_rate_are_of_the_configurations_of_today():
    kept = records.read_all(judges.FOLDERS[judges.PROTOCOL])
    found = {(one.run_info.experiment, one.run_info.name): one.run_info.config_hash for one in kept}
    expected = {
        (setting, run.name): config_hash(run)
        for setting in {setting for setting, _ in found}
        for run in runs(setting, one_rate=str(ROOT / "experiments" / "evidence" / "tuned" / f"{setting}.json"))
    }
    assert found.items() <= expected.items()


def test_the_page_is_what_the_committed_results_say(evidence):
    assert claims.PAGE.read_text(encoding="utf-8") == claims.markdown(evidence)


def test_no_number_is_measured_without_results():
    empty = Evidence(())
    for claim in (*claims.PAPER, *claims.OURS):
        verdict = claim.verdict(empty)
        assert verdict.outcome in ("not measured yet", "not testable here", "confirmed by tests")
        assert verdict.findings == []
    rows = [line.split(" | ") for line in claims.markdown(empty).splitlines() if line.startswith("| ") and "**" in line]
    assert len(rows) == len(claims.PAPER) + len(claims.OURS)
    assert not any(NUMBER.search(row[-1]) for row in rows)


def test_what_tests_confirm_is_tested():
    for claim in (*claims.PAPER, *claims.OURS):
        files = re.findall(r"tests/[\w/]+\.py", claim.test)
        assert bool(files) or claim.judge or claim.untestable, claim.text
        assert all((ROOT / file).is_file() for file in files), claim.test


def test_the_numbers_are_those_of_the_report(digits):
    group = summarize([run for runs in digits.arms.values() for run in runs.values()]).groups[0]
    method = group.method("local_fit")
    spent = [measures.work(run, 0.95).spent for run in digits.arms["local_fit"].values()]
    assert sorted(spent)[2] == method.held[1].flops.median
    final = [measures.final(run) for run in digits.arms["local_fit"].values()]
    assert sum(final) / 5 == pytest.approx(method.final.mean)
    assert not measures.work(digits.arms["student_only"][0], 0.95).reached


def test_the_area_over_operations_ends_where_it_is_told_to(digits):
    run = digits.arms["student_only"][0]  # all steps cost the same, so operations are as good as epochs
    assert measures.area_over_flops(run) == pytest.approx(area(run), rel=1e-3)
    points = run.train_info.points
    early = measures.area_over_flops(run, until=points[1].flops)
    assert early == pytest.approx((points[0].students["accuracy"] + points[1].students["accuracy"]) / 2)


def test_work_that_is_never_done_makes_a_ratio_an_upper_bound(digits):
    ours, never = digits.arms["local_fit"], digits.arms["student_only"]
    ratio = measures.work_ratio(ours, never, 0.95)
    assert ratio["high"] < 0.5
    assert measures.work_ratio(never, ours, 0.95) is None
    (finding,) = judges.earlier("local_fit", "student_only")(Evidence((digits,)))
    assert finding.outcome == "confirmed"
    assert finding.text.startswith("at most 0.")
    (finding,) = judges.earlier("student_only", "local_fit")(Evidence((digits,)))
    assert finding.outcome == "refuted"


@pytest.mark.parametrize(
    ("parts", "outcome"),
    [
        ([[]], "not measured yet"),
        ([["confirmed"], ["confirmed"]], "confirmed"),
        ([["confirmed", "refuted"]], "mixed"),
        ([["confirmed", "open"]], "confirmed in part"),
        ([["refuted"], []], "refuted in part"),
        ([["open"]], "open"),
    ],
)
def test_outcomes_are_summed_over_places_and_parts(parts, outcome):
    findings = [[Finding("here", 5, each, "") for each in part] for part in parts]
    assert judges.summed(findings).outcome == outcome


def test_four_seeds_judge_nothing(digits):
    few = replace(digits, arms={name: {seed: found[seed] for seed in range(4)} for name, found in digits.arms.items()})
    assert judges.higher("dcr_dfg", "student_only")(Evidence((few,))) == []


def test_a_claim_is_refuted_by_all_seeds_and_not_by_one(digits):
    (few,) = judges.earlier("dcr", "distillation")(Evidence((digits,)))
    assert few.text == "`dcr` holds 95 % in 0 of 5 seeds, `distillation` in 1"
    assert few.outcome == "open"


def test_the_tables_have_the_medians_of_the_report(digits):
    text = tables.markdown([digits])
    assert "| local_fit | 5 | 32.6 GFLOPs | 115 GFLOPs | 96.0 ± 0.3 |" in text
    assert "0.182 (0.115 to 0.288) times the work of halo" in text


def test_the_page_says_what_each_arm_needs(digits):
    rows = {row.split(" | ")[0].strip("| *"): row for row in page.table(digits)[2:]}
    assert list(rows)[:8] == [page.label(digits, arm) for arm in page.FIRST]
    ours, halo = "24.3 GFLOPs (14.8 to 40)", "133 GFLOPs (69.8 to 255)"
    assert f"| {ours} | 113 GFLOPs (94.7 to 135) | 96.0 ± 0.3 % | " in rows["Local fit in sub-batches, jump"]
    ratio = "0.182 (0.115 to 0.288)"
    assert rows["HALO-style: local fit, jump"].endswith(f"| {halo} | never in 4 of 5 | 94.2 ± 1.5 % | {ratio} |")
    assert rows["KL"].endswith("| never in 4 of 5 | never | 89.3 ± 2.6 % | at most 0.0218 (0.0119 to 0.0399) |")
    assert page.summary([digits])[2].split(" | ")[2:6] == [ours, "HALO-style: local fit, jump", halo, ratio]


def test_the_front_page_has_the_numbers_of_the_committed_results(digits):
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("**", "")
    for arm in ("student_only", "distillation", "dcr_dfg", "halo", "local_fit"):
        cells = page.table(digits)[2 + page.in_order(digits).index(arm)].split(" | ")
        assert f"| {cells[3]} | {cells[1]} |" in readme


def test_the_front_page_has_the_ratio_of_every_setting(evidence):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    said = readme[readme.index("Against the best other method") :].partition("[Results]")[0]
    ratios = [re.search(r"[\d.]+", row.split(" | ")[5]) for row in page.summary(page.shown(evidence))[2:]]
    assert all(f"{float(ratio[0]):.2f}" in said for ratio in ratios if ratio)


@pytest.mark.parametrize("name", ["cifar100, 100 % of the data", "minilm, Re-initialised attention"])
def test_the_answer_has_the_score_of_every_arm_at_the_end(evidence, name):
    (place,) = (place for place in evidence.places if place.name == name)
    head, _, _ = page.parts(page.PAGE.read_text(encoding="utf-8"))
    said = set(re.findall(r"\d+\.\d", head))
    ends = {f"{100 * sum(map(measures.final, runs.values())) / len(runs):.1f}" for runs in place.arms.values()}
    assert len(ends) >= 5
    assert ends <= said


def test_the_page_of_results_is_that_of_the_committed_results(evidence):
    places = page.shown(evidence)
    assert places
    _, inside, _ = page.parts(page.PAGE.read_text(encoding="utf-8"))
    assert inside.strip() == page.markdown(evidence).strip()
    assert all(page.figure_of(place.setting).is_file() for place in places)


def test_curves_are_compared_with_the_teacher_on_the_same_examples(evidence, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(page, "_needs", lambda axes, place: drawn.append(axes.figure.axes[0]))
    (place,) = (place for place in evidence.places if place.setting == "cifar100" and place.group.startswith("100"))
    page.draw([place], tmp_path / "figure.png")
    heights = [line.get_ydata()[0] for line in drawn[0].lines if len(set(line.get_ydata())) == 1]
    assert heights == [0.476, pytest.approx(0.95 * 0.476)]
    assert place.teacher == pytest.approx(0.4871)


def test_the_figure_of_a_setting_has_a_row_for_each_group(digits, tmp_path):
    one, two = (page.draw([digits] * count, tmp_path / f"{count}.png") for count in (1, 2))
    with Image.open(one) as first, Image.open(two) as second:
        assert (second.width, second.height) == (first.width, 2 * first.height)


def test_what_is_kept_has_no_path_of_the_machine(digits, tmp_path):
    runs_folder = tmp_path / "runs"
    for seed, run in digits.arms["local_fit"].items():
        records.write(run, runs_folder / "digits" / f"local_fit-seed{seed}")
    chosen = {
        "format": 1,
        "place": str(tmp_path / "runs.py"),
        "options": {"setting": "digits", "data": str(tmp_path)},
        "methods": [],
    }
    records.write_json(chosen, runs_folder / "digits_further_tune" / "tuned.json")
    written = keep.keep("digits", runs_folder, tmp_path / "kept")
    assert [path.relative_to(tmp_path / "kept").as_posix() for path in written] == [
        "results/digits/results.jsonl",
        "tuned/digits_further.json",
    ]
    assert not any(str(tmp_path) in path.read_text() for path in written)
    assert len(records.read_all(tmp_path / "kept" / "results" / "digits")) == 5


def test_a_grid_resumes_after_the_runs_that_are_kept(digits, tmp_path):
    made, again, kept = tmp_path / "made", tmp_path / "again", tmp_path / "kept"
    for run in digits.arms["local_fit"].values():
        folder = made / "digits" / run.run_info.name
        records.write_json({"config_hash": run.run_info.config_hash, "config": run.run_info.config}, folder / "config.json")
        records.write(run, folder)
    keep.keep("digits", made, kept)
    written = keep.restore("digits", again, kept)
    assert len(written) == 5
    for path in written:
        first = made / path.relative_to(again)
        assert path.read_bytes() == first.read_bytes()
        assert (path.parent / "config.json").read_bytes() == (first.parent / "config.json").read_bytes()
    assert keep.restore("digits", again, kept) == []


def test_seconds_are_those_of_runs_that_had_the_machine_for_themselves(digits):
    judge = judges.earlier("local_fit", "dcr_dfg", axis="seconds")
    assert judge(Evidence((digits,))) == []
    (alone,) = judges.places_of(judges.ALONE, [run for runs in digits.arms.values() for run in runs.values()])
    (finding,) = judge(Evidence((alone,)))
    assert (finding.place, finding.seeds) == ("digits, alone on the machine", 5)
    assert "times the work of `dcr_dfg`" in finding.text


def test_groups_and_arms_can_be_left_out():
    assert {run.group for run in runs("minilm", seeds=1, group="Linear")} == {"Linear attention"}
    options = name_values(["setting=fashion", "group=100", "only=halo,theseus"])  # as the command line reads them
    assert {(run.group, run.method) for run in runs(seeds=1, **options)} == {
        ("100 % of the data", "halo"),
        ("100 % of the data", "theseus"),
    }
    assert {run.method for run in runs("digits", seeds=1, only="dcr")} == {"dcr"}  # not dcr_dfg
