"""One run: its result is complete, true, and the same after an interruption."""

import copy
import dataclasses
import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional as F

import segue
from segue.checkpoint.lock import FILE, locked
from segue.diagnostics.costs import cost
from segue.diagnostics.counting import StepCosts
from segue.errors import ConfigError
from segue.lab.config import config_hash, from_dict, to_dict
from segue.lab.run import Drift, block_of, is_finished, run
from segue.lab.teachers import scores_of, teacher_model, teachers_of
from segue.reporting import records as results
from segue.reporting.records import commit
from segue.schedules import Adaptive
from segue.sites import select
from segue.training.recipe import Recipe
from segue.training.resume import Interruption
from segue.training.tasks import Classification
from tests.helpers import tiny_runs
from tests.helpers.tiny import SITES, Net, batch
from tests.helpers.tiny_runs import TASK, TEACHER, config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of runs that share a teacher."""
    return tmp_path_factory.mktemp("lab") / "tiny"


@pytest.fixture(scope="module")
def finished(place):
    return {name: run(config_of(name), place / name) for name in ("dcr_dfg", "theseus", "halo", "adaptive")}


def config_of(name):
    if name != "adaptive":
        return config(name)
    closes = Adaptive(until=0.9, budget=2.5, fastest=0.2, memory=0.01, every=1)  # earlier than its deadline
    return config("dcr_dfg", plan={"schedule": closes}, evaluations=10)


def numbers(result):
    """Return all of a result but what differs from one process to the next."""
    data = dataclasses.asdict(result)
    data.pop("meta_info")
    for name in ("seconds", "peak_memory"):
        data["train_info"].pop(name)
    for point in data["train_info"]["points"]:
        point.pop("seconds")
    data["run_info"].pop("name")
    return data


def teacher_of(place):
    return teacher_model(TEACHER, place / "teachers", TASK.load())[0].eval()


def scored(model, batches):
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with torch.no_grad():
        logits = model(x)
    return pytest.approx(
        {"accuracy": (logits.argmax(-1) == y).double().mean().item(), "loss": F.cross_entropy(logits, y).item()}, rel=1e-5
    )


@pytest.mark.parametrize("name", ["dcr_dfg", "theseus", "halo"])
def test_a_result_is_complete_and_reads_as_it_was_written(name, finished, place):
    result, path = finished[name], place / name / "result.json"
    assert numbers(results.read(path)) == numbers(result)
    written = json.loads(path.read_text())
    assert list(written) == ["format", "run_info", "train_info", "meta_info"]
    for kind, part in ((results.RunInfo, "run_info"), (results.TrainInfo, "train_info")):
        assert set(written[part]) == {field.name for field in dataclasses.fields(kind)}
    for point in written["train_info"]["points"]:
        assert set(point) == {field.name for field in dataclasses.fields(results.Point)}
    info = result.run_info
    assert (info.experiment, info.method, info.group, info.seed) == ("tiny", name, "all", 0)
    assert from_dict(info.config) == config(name)
    assert info.config_hash == config_hash(config(name))
    assert set(result.meta_info) == {"versions", "hardware", "commit", "command", "begun", "finished"}
    assert {"segue", "python", "torch", "accelerate"} <= set(result.meta_info["versions"])
    assert result.meta_info["hardware"]["processes"] == 1
    train = result.train_info
    assert train.sites == ["blocks.0.attn", "blocks.1.attn"]
    assert [point.step for point in train.points] == [0, 2, 5, 8, 10]
    assert train.steps_per_epoch == (1297 // 10) // 16
    for point in train.points:
        assert set(point.blend) == set(point.students) == {"accuracy", "loss"}
        for measured in (point.cosine, point.relative_error, point.drift_blend, point.drift_students):
            assert list(measured) == train.sites
        assert list(point.gradient_norm) == list(point.weights) == ([] if point.step == 0 else train.sites)
        assert sum(point.losses.values()) == pytest.approx(point.loss or 0.0, rel=1e-5)
        assert point.lr is not None
    assert train.peak_memory > 1 << 20
    assert train.skipped_steps == 0
    assert not (place / name / "checkpoints").exists()
    assert not (place / name / results.BEGUN).exists()
    assert len((place / name / "metrics.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize("name", ["dcr_dfg", "theseus", "halo"])
def test_the_first_point_is_the_plain_swap_and_the_teachers_scores_are_its_own(name, finished, place):
    train = finished[name].train_info
    loaded = TASK.load()
    teacher = teacher_of(place)
    assert train.teacher == scored(teacher, loaded.final)
    assert train.teacher_eval == scored(teacher, loaded.validation)
    swapped = teacher_of(place)
    segue.replace_(swapped, config(name).plan, total_steps=10).finalize_(force=True)
    first = train.points[0]
    assert first.students == scored(swapped.eval(), loaded.validation)
    assert first.loss is None
    if name == "theseus":  # a tenth of the student from the start
        assert first.alpha == pytest.approx(0.9)
        assert all(value > 0 for value in first.drift_blend.values())
    else:
        assert first.blend == pytest.approx(train.teacher_eval, rel=1e-6)
        assert set(first.drift_blend.values()) == {0.0}
    assert all(value > 0 for value in first.drift_students.values())


def test_the_final_score_is_that_of_the_model_which_is_kept(place):
    result = run(config("dcr"), place / "kept", keep_model=True)
    loaded = TASK.load()
    model = segue.load_(loaded.build(7), place / "kept" / "model").eval()
    assert result.train_info.final == scored(model, loaded.final)
    assert result.train_info.points[-1].students == scored(model, loaded.validation)
    assert result.final == result.train_info.final["accuracy"]
    assert model.segue["plan"]["sites"] == ["blocks.0.attn", "blocks.1.attn"]


def test_the_kept_model_has_the_averaged_or_the_best_weights_that_were_scored(place):
    stopping = segue.EarlyStopping(score="loss", mode="min", patience=2, restore_best=True)
    recipe = segue.Recipe(steps=30, lr=3e-2, guard=segue.Guard(), ema=segue.Ema(decay=0.9, final=True), early_stopping=stopping)
    run_config = config("dcr", recipe=recipe, evaluations=30)
    assert from_dict(to_dict(run_config)) == run_config
    train = run(run_config, place / "best", keep_model=True).train_info
    assert train.best_step < train.stopped_at < 30
    assert train.stopped_at == train.points[-1].step
    assert train.flops == train.points[-1].flops
    model = segue.load_(TASK.load().build(7), place / "best" / "model").eval()
    assert train.final == scored(model, TASK.load().final)
    best = next(point for point in train.points if point.step == train.best_step)
    assert best.ema == scored(model, TASK.load().validation)
    assert best.ema["loss"] == min(point.ema["loss"] for point in train.points if point.alpha == 0)


@pytest.mark.filterwarnings("ignore:the plan's (student|phases)")
@pytest.mark.parametrize("part", ["student", "phases"])
def test_a_model_with_a_part_of_ones_own_is_kept_too(part, place):
    def student(teacher, site):
        return segue.students.Reinit()(teacher, site)

    phases = (segue.phases.Phase(name="all", schedule=lambda progress, site: max(0.0, 1 - 2 * progress)),)
    own = {"student": student} if part == "student" else {"phases": phases}
    result = run(config("dcr", plan=own), place / f"own {part}", keep_model=True)
    model = segue.load_(TASK.load().build(7), place / f"own {part}" / "model", **own).eval()
    assert result.train_info.final == scored(model, TASK.load().final)


@pytest.mark.parametrize("name", ["dcr_dfg", "theseus", "halo"])
def test_flops_are_the_sum_of_the_steps_before_a_point(name, finished, place):
    train = finished[name].train_info
    loaded = TASK.load(data_fraction=0.1)
    batch = next(iter(loaded.train(16, 0)))
    count = StepCosts(teacher_of(place), config(name).plan, 10, batch, TASK.loss)
    steps = [count[step].flops for step in range(10)]
    for point in train.points:
        assert point.flops == sum(steps[: point.step])
    assert train.flops == sum(steps)
    assert train.step_flops["students"] == count.students_alone().flops
    assert train.step_flops["teacher_pass"] == count.teacher_pass()
    assert train.step_flops["blend"] == max(steps[1:])


def test_flops_of_an_adaptive_run_are_those_of_the_alphas_that_it_had(finished, place):
    train, plan = finished["adaptive"].train_info, config_of("adaptive").plan
    alphas = [point.alphas for point in train.points]  # one evaluation after each step

    def alpha(progress, site):
        return alphas[round(10 * progress)][site.name]

    guidance = dataclasses.replace(plan.guidance, schedule=lambda *at: max(alpha(*at), plan.guidance.schedule(*at)))
    fixed = dataclasses.replace(plan, schedule=alpha, guidance=guidance)
    batch = next(iter(TASK.load(data_fraction=0.1).train(16, 0)))
    steps = cost(teacher_of(place), fixed, batch, total_steps=10, loss_fn=TASK.loss).per_step
    assert [point.flops for point in train.points] == [sum(steps[: point.step]) for point in train.points]
    assert train.flops == sum(steps) < cost(teacher_of(place), plan, batch, total_steps=10, loss_fn=TASK.loss).flops
    assert train.cost["adaptive"] is False


def test_accumulated_steps_cost_as_many_batches(place):
    recipe = Recipe(steps=3, lr=1e-2, accumulate=2)
    result = run(config("dcr", recipe=recipe, evaluations=1), place / "accumulated")
    single = run(config("dcr", recipe=Recipe(steps=3, lr=1e-2), evaluations=1), place / "single")
    assert result.train_info.flops == 2 * single.train_info.flops
    assert result.train_info.points[-1].epoch == pytest.approx(6 / 8)


def test_a_finished_run_is_read_and_not_repeated(finished, place):
    before = {path: path.stat().st_mtime_ns for path in (place / "dcr_dfg").iterdir()}
    again = run(config("dcr_dfg"), place / "dcr_dfg")
    assert numbers(again) == numbers(finished["dcr_dfg"])
    assert again.meta_info == finished["dcr_dfg"].meta_info
    assert {path: path.stat().st_mtime_ns for path in (place / "dcr_dfg").iterdir()} == before
    assert is_finished(config("dcr_dfg"), place / "dcr_dfg")
    relabelled = config("dcr_dfg", label="DCR and guidance")
    assert is_finished(relabelled, place / "dcr_dfg")


def test_a_folder_with_another_configuration_is_refused(finished, place):
    other = config("dcr_dfg", recipe=Recipe(steps=10, lr=2e-2))
    for act in (run, is_finished):
        with pytest.raises(ConfigError, match="belongs to another run than") as caught:
            act(other, place / "dcr_dfg")
    assert config_hash(other) in str(caught.value)
    assert config_hash(config("dcr_dfg")) in str(caught.value)
    assert "choose another --out" in str(caught.value)
    assert is_finished(config("dcr_dfg"), place / "dcr_dfg")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stopping(type(TASK)):
    """The task of these tests, whose loss sends a signal in a step of a training."""

    at: int = 6

    @property
    def loss(self_):  # the loss inside has a self of its own
        taken = []

        class Loss(type(TASK.loss)):
            def __call__(self, model, batch):
                listener = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
                training = model.training and isinstance(listener, Interruption)  # fit listens; what counts does not
                taken.extend([1] * training)
                if len(taken) == self_.at:
                    os.kill(os.getpid(), signal.SIGTERM)
                return super().__call__(model, batch)

        return Loss(label_smoothing=self_.label_smoothing)


@pytest.mark.parametrize("name", ["dcr_dfg", "theseus", "halo", "adaptive"])
def test_an_interrupted_run_has_the_result_of_an_undisturbed_one(name, finished, place):
    settings = {field.name: getattr(TASK, field.name) for field in dataclasses.fields(TASK)}
    stopping = dataclasses.replace(config_of(name), task=Stopping(**settings))
    folder = place / f"interrupted {name}"
    with pytest.raises(SystemExit):
        run(stopping, folder)
    assert segue.checkpoint.state.saved_step(folder / "checkpoints") == 6
    assert not (folder / "result.json").exists()
    known, whole = results.read_begun(folder / results.BEGUN), finished[name].train_info
    points = [point for point in whole.points if point.step <= 6]
    same = {"points": known.train_info.points, "seconds": whole.seconds, "flops": whole.flops, "final": whole.final}
    if name == "adaptive":  # before its end a run is counted as planned, at the most
        same |= {"cost": whole.cost, "step_flops": whole.step_flops}
    assert dataclasses.replace(known.train_info, **same, peak_memory=whole.peak_memory) == dataclasses.replace(whole, **same)
    assert [(one.step, one.students) for one in known.train_info.points] == [(p.step, p.students) for p in points]
    assert all(
        one.flops == p.flops or (name == "adaptive" and one.flops > p.flops)
        for one, p in zip(known.train_info.points, points, strict=True)
    )
    (folder / "config.json").unlink()  # the same run but for the task that stops
    assert numbers(run(config_of(name), folder)) == numbers(finished[name])


def test_a_log_that_lost_its_last_evaluation_does_not_lose_the_final_score(place):
    task = dataclasses.replace(TASK, eval_examples=2000)  # all of them, so that the last evaluation is the final one
    settings = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    folder = place / "lost"
    with pytest.raises(SystemExit):
        run(config("dcr", task=Stopping(**settings, at=10)), folder)
    (folder / "config.json").unlink()
    (folder / "metrics.jsonl").write_bytes(b"[[[[")
    undisturbed = run(config("dcr", task=task), place / "not lost")
    again = run(config("dcr", task=task), folder).train_info
    assert again.final == undisturbed.train_info.final
    assert again.teacher_eval == undisturbed.train_info.teacher_eval  # the first one, which shows the original, is lost too


def test_a_run_that_is_timed_is_the_same_without_diagnostics(finished, place):
    timed = run(dataclasses.replace(config_of("theseus"), alone=True), place / "timed")
    measured = ("gate_variance", "gate_variance_error", "data_variance", "predicted_variance")
    points = finished["theseus"].train_info.points
    assert all(getattr(points[0], name) for name in measured)
    without = [dataclasses.replace(point, **{name: {} for name in measured}) for point in points]
    same = dataclasses.replace(finished["theseus"].train_info, points=without)
    wanted = numbers(dataclasses.replace(finished["theseus"], train_info=same))
    wanted["run_info"]["config"]["alone"] = True
    assert numbers(timed) == wanted
    assert timed.run_info.config_hash == finished["theseus"].run_info.config_hash


def test_the_original_is_scored_where_no_evaluation_shows_it(place):
    train = run(config("student_only", recipe=Recipe(steps=2, lr=1e-2), evaluations=1), place / "alone").train_info
    assert train.points[0].alpha == 0
    assert train.teacher_eval == scored(teacher_of(place), TASK.load().validation)


def test_the_commit_of_this_code_is_noted():
    found = commit()
    assert found is None or len(found.removesuffix("+")) >= 12


@pytest.mark.parametrize("there", [False, True])
def test_a_refused_run_does_not_claim_its_folder(place, there):
    folder = place / "new" / "broken"
    if there:
        folder.mkdir(parents=True)
        (folder / "log.txt").touch()  # a grid's worker writes it
    with pytest.raises(segue.errors.SiteError, match="Nearest names: blocks.0.attn"):
        run(config("dcr", plan={"sites": "blocks.*.atn"}), folder)
    assert ({path.name for path in folder.iterdir()} == {"log.txt", FILE}) if there else not folder.parent.exists()
    shutil.rmtree(place / "new", ignore_errors=True)


def test_a_run_that_comes_too_late_leaves_the_files_of_the_first(place):
    folder, late = place / "first", config("dcr")

    def work() -> None:
        with pytest.raises(segue.errors.CheckpointError, match="is in use by another process"):
            run(late, folder)

    with locked(folder):  # it has written nothing yet when the second begins
        with ThreadPoolExecutor() as pool:
            pool.submit(work).result()
        results.write_json({"config_hash": config_hash(late)}, folder / "config.json")
        with ThreadPoolExecutor() as pool:
            pool.submit(work).result()
    assert (folder / "config.json").exists()
    shutil.rmtree(folder)


def test_teachers_are_beside_the_runs_and_shared(finished, place):
    assert {path.name for path in (place / "teachers").iterdir()} - {"scores"} == {config_hash(TEACHER)}
    assert not (place.parent / "teachers").exists(), "nothing is written outside of --out"
    assert tiny_runs.config("dcr").teacher == TEACHER


def test_teachers_may_have_a_folder_of_their_own_or_that_of_version_0_1_0(tmp_path, monkeypatch):
    run_folder = tmp_path / "grid" / "dcr-seed0"
    assert teachers_of(TEACHER, run_folder) == tmp_path / "grid" / "teachers"
    old = tmp_path / "teachers" / config_hash(TEACHER)
    old.mkdir(parents=True)
    assert teachers_of(TEACHER, run_folder) == tmp_path / "grid" / "teachers", "it is not complete"
    (old / "teacher.json").touch()
    assert teachers_of(TEACHER, run_folder) == tmp_path / "teachers"
    monkeypatch.setenv("SEGUE_TEACHERS", str(tmp_path / "cache"))
    assert teachers_of(TEACHER, run_folder) == tmp_path / "cache"


EXAMPLE = batch(7)


def by_hand(untouched, model):
    """Run the blocks one after the other and compare their outputs, each example's by itself."""
    found = {}
    with torch.no_grad():
        x = y = EXAMPLE[0]
        for index, (theirs, ours) in enumerate(zip(untouched.blocks, model.blocks, strict=True)):
            x, y = theirs(x), ours(y)
            found[f"blocks.{index}.attn"] = ((y - x).square().sum((1, 2)) / x.square().sum((1, 2))).mean().item()
    return found


@pytest.mark.parametrize("method", ["dcr", "lolcats", "theseus_gumbel"])
def test_drift_is_the_relative_squared_distance_after_each_block(method):
    model = Net(dropout=0.3)
    untouched = copy.deepcopy(model).eval()
    drift = Drift(model, select(model, SITES), EXAMPLE, Classification())
    seen = []

    def measured(handover):
        found = drift(handover)
        model.eval()
        blend = by_hand(untouched, model)
        with handover.as_student():
            students = by_hand(untouched, model)
        model.train()
        seen.append(handover.steps_done)
        assert found == {"drift_blend": pytest.approx(blend, rel=1e-4), "drift_students": pytest.approx(students, rel=1e-4)}
        return found

    plan = segue.methods.ALL[method](sites=SITES)
    batches = [batch(i) for i in range(4)]
    recipe = Recipe(steps=10, lr=1e-2)
    points = segue.fit(
        model, plan, batches, Classification(), recipe=recipe, evaluations=5, measure=measured, progress=None
    ).history
    assert len(seen) == len(points) == 6
    assert all(value > 0 for value in points[0]["drift_students"].values())
    if method != "theseus_gumbel":  # which begins with a tenth for the student
        assert set(points[0]["drift_blend"].values()) == {0.0}
    assert points[-1]["drift_blend"] == points[-1]["drift_students"]


def test_measuring_leaves_no_hook_and_every_mode_as_it_was():
    model = Net(dropout=0.3).train()
    drift = Drift(model, select(model, SITES), EXAMPLE, Classification())
    handover = segue.replace_(model, segue.Plan(sites=SITES), total_steps=4)
    modes = [module.training for module in model.modules()]
    drift(handover)
    drift(handover)
    assert [module.training for module in model.modules()] == modes
    assert not any(block._forward_hooks for block in model.blocks)
    assert not any(seam.records for seam in handover.seams.values())


def test_a_padding_mask_counts_tokens_only():
    class Sentences(Net):
        def forward(self, x, attention_mask):
            return super().forward(x)

    x, y = EXAMPLE
    masks = [torch.ones(8, 5), torch.cat([torch.ones(8, 2), torch.zeros(8, 3)], 1)]
    found = []
    for mask in masks:
        model = Sentences()
        given = {"x": x, "attention_mask": mask, "labels": y}
        drift = Drift(model, select(model, SITES), given, Classification())
        found.append(drift(segue.replace_(model, segue.Plan(sites=SITES), total_steps=4))["drift_students"])
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("site", "block"),
    [
        ("blocks.11.attn", "blocks.11"),
        ("bert.encoder.layer.3.attention.self", "bert.encoder.layer.3"),
        ("stages.1.blocks.2.attn.0.inner", "stages.1.blocks.2.attn.0"),
        ("mixer", "mixer"),
        ("layers.4", "layers.4"),
    ],
)
def test_the_block_of_a_site_ends_at_the_last_number_of_its_name(site, block):
    assert block_of(site) == block


def test_a_teacher_without_stages_is_the_model_as_it_is_built(tmp_path):
    pretrained = dataclasses.replace(TEACHER, stages=())
    result = run(dataclasses.replace(config("dcr"), teacher=pretrained), tmp_path / "runs" / "dcr")
    loaded = TASK.load()
    assert result.train_info.teacher == scored(loaded.build(TEACHER.seed).eval(), loaded.final)
    assert not list(tmp_path.rglob("teacher.json"))


def test_runs_that_share_a_pretrained_model_evaluate_it_on_all_test_examples_once(tmp_path, monkeypatch):
    pretrained = dataclasses.replace(TEACHER, stages=())
    given = dataclasses.replace(config("dcr"), teacher=pretrained)
    measured = []

    def counted(model, about, folder, measure):
        return scores_of(model, about, folder, lambda model: measured.append(about["seed"]) or measure(model))

    monkeypatch.setattr("segue.lab.run.scores_of", counted)
    results = [run(given, tmp_path / "runs" / name) for name in ("first", "second")]
    assert results[0].train_info.teacher == results[1].train_info.teacher
    run(dataclasses.replace(given, seed=given.seed + 1), tmp_path / "runs" / "third")  # another seed: perhaps other data
    assert measured == [given.seed, given.seed + 1]


def test_scores_are_measured_again_for_other_weights(tmp_path):
    model = torch.nn.Linear(2, 2)
    first = scores_of(model, {}, tmp_path, lambda model: {"sum": model.weight.sum().item()})
    assert scores_of(model, {}, tmp_path, lambda _: {"sum": -1.0}) == first
    with torch.no_grad():
        model.weight.add_(1.0)
    assert scores_of(model, {}, tmp_path, lambda _: {"sum": -1.0}) == {"sum": -1.0}
