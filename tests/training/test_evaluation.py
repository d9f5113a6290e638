"""Evaluations: scores over uneven batches, both sides, nothing changed by them, and the log of a training."""

import json
import math
import random
from contextlib import nullcontext
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import segue
from segue.errors import CheckpointError
from segue.phases import Phase
from segue.training.batches import InOrder
from segue.training.distributed import Processes
from segue.training.evaluation import Evaluator, MetricsLog, evaluation_steps
from segue.training.recipe import Recipe
from segue.training.tasks import Classification
from tests.helpers.tiny import SITES, Net, batch, constant, same_state, start
from tests.training.fit_cases import VALIDATION, CountedBatches, fit

METHODS = segue.methods.ALL

ALONE = Processes(torch.device("cpu"))
UNEVEN = [batch(1, size=5), batch(2, size=3), batch(3, size=1)]
EVERYTHING = tuple(torch.cat(parts) for parts in zip(*UNEVEN, strict=True))


def evaluator(batches=UNEVEN, scores=None) -> Evaluator:
    return Evaluator(batches, scores or Classification().scores, ALONE, nullcontext)


class Counting(Classification):
    """A loss that counts the forwards of evaluations."""

    def __init__(self):
        super().__init__()
        self.scored = 0

    def scores(self, model, batch):
        self.scored += 1
        return super().scores(model, batch)


@pytest.mark.parametrize(("settings", "saved"), [({}, 3), ({"backbone": "train"}, 0), ({"train": "all"}, 0)])
def test_while_the_blend_is_the_original_it_is_scored_once_and_the_numbers_stay(settings, saved):
    phases = (Phase(name="fit", length=0.5, local=True), Phase(name="rest"))
    plan = segue.Plan(sites=SITES, guidance=segue.losses.FeatureGuidance(), phases=phases, **settings)
    x, y = EVERYTHING
    fixed = InOrder(9, 3, lambda chosen: (x[chosen], y[chosen]))
    counts, histories = [], []
    for validation in (fixed, list(fixed)):
        loss = Counting()
        fitted = fit(Net(), plan, None, loss, steps=8, evaluations=8, validation=validation)
        counts.append(loss.scored)
        histories.append([{key: value for key, value in m.items() if key != "seconds"} for m in fitted.history])
    assert histories[0] == histories[1]
    assert counts[1] - counts[0] == saved * len(fixed)


def test_every_example_counts_the_same_whatever_its_batch():
    model = Net().eval()
    found = evaluator()(model)
    x, y = EVERYTHING
    logits = model(x)
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-6)
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == y).double().mean().item(), rel=1e-12)
    whole = evaluator(scores=lambda model, batch: {"loss": Classification()(model, batch)})(model)
    assert whole["loss"] == pytest.approx(found["loss"], rel=1e-6)


def test_an_evaluation_changes_nothing_in_the_model():
    handover = start(dropout=0.5)
    handover.model.blocks[0].mlp.eval()
    modes = [module.training for module in handover.model.modules()]
    weights = {name: tensor.clone() for name, tensor in handover.model.state_dict().items()}
    found = [evaluator()(handover.model), evaluator()(handover.model)]
    found.append(evaluator().of_students(handover)[0])
    assert [module.training for module in handover.model.modules()] == modes
    assert same_state(handover.model.state_dict(), weights)
    assert all(p.grad is None for p in handover.model.parameters())
    assert found[0] == found[1]  # dropout is off
    assert found[2] != found[0]
    assert all(seam.state.view.value == "blend" and not seam.records for seam in handover.seams.values())


def test_the_students_alone_are_what_the_finished_model_will_be():
    handover = start(segue.Plan(sites=SITES, schedule=constant(0.4)))
    students, alike = evaluator().of_students(handover)
    wanted = handover.similarity(UNEVEN[0][0])
    assert {name: site["cosine"] for name, site in alike.items()} == {name: s.cosine for name, s in wanted.items()}
    assert {name: site["relative_error"] for name, site in alike.items()} == {n: s.relative_error for n, s in wanted.items()}
    blend = evaluator()(handover.model)
    model = handover.finalize_(force=True)
    assert evaluator()(model) == students
    assert blend != students


def test_released_teachers_leave_scores_without_similarity():
    handover = start(segue.Plan(sites=SITES, schedule=constant(0.0), release=True), total_steps=4)
    x, y = batch()
    F.cross_entropy(handover.model(x), y).backward()
    handover.step()
    assert all(seam.teacher is None for seam in handover.seams.values())
    students, alike = evaluator().of_students(handover)
    assert alike == {}
    assert set(students) == {"accuracy", "loss"}


def test_validation_batches_that_can_be_read_only_once_are_kept():
    once, model = evaluator(iter(UNEVEN)), Net()
    assert once(model) == once(model) == evaluator()(model)


# In a training


def test_an_evaluation_says_what_anyone_would_measure():
    plan = METHODS["theseus_gumbel"](sites=SITES, schedule=segue.schedules.Linear())
    seen = []

    def measured(handover):
        """Measure by hand what the evaluation is about to return."""
        model = handover.model.eval()
        both = {}
        with torch.no_grad():
            for name, view in (("blend", None), ("students", handover.as_student)):
                if view is None:
                    logits = [model(x) for x, _ in VALIDATION]
                else:
                    with view():
                        logits = [model(x) for x, _ in VALIDATION]
                answers, labels = torch.cat(logits), torch.cat([y for _, y in VALIDATION])
                both[name] = {
                    "accuracy": (answers.argmax(-1) == labels).double().mean().item(),
                    "loss": F.cross_entropy(answers, labels).item(),
                }
        both["cosine"] = {site: s.cosine for site, s in handover.similarity(VALIDATION[0][0]).items()}
        both["relative_error"] = {site: s.relative_error for site, s in handover.similarity(VALIDATION[0][0]).items()}
        both["alpha"] = sum(handover.alphas.values()) / 3
        both["alphas"] = dict(handover.alphas)
        model.train()
        seen.append(both)
        return {"mine": {"steps": handover.steps_done}}

    fitted = fit(Net(), plan, steps=8, evaluations=(1, 4), validation=VALIDATION, measure=measured)
    assert [metrics["step"] for metrics in fitted.history] == [0, 1, 4, 8]
    for metrics, by_hand in zip(fitted.history, seen, strict=True):
        for side in ("blend", "students"):
            assert metrics[side] == pytest.approx(by_hand[side], rel=1e-6)
        assert metrics["cosine"] == by_hand["cosine"]
        assert metrics["relative_error"] == by_hand["relative_error"]
        assert metrics["alpha"] == by_hand["alpha"] == 1 - metrics["step"] / 8
        assert metrics["alphas"] == by_hand["alphas"]
        assert metrics["mine"] == {"steps": metrics["step"]}
        assert metrics["epoch"] == pytest.approx(metrics["step"] / 6)
    assert fitted.history[0]["blend"] != fitted.history[0]["students"]
    assert fitted.history[-1]["blend"] == fitted.history[-1]["students"]
    assert fitted.history[0]["gradient_norm"] == {}
    assert fitted.history[0]["loss"] is None
    for metrics in fitted.history:
        assert metrics["lr"] == pytest.approx(1e-2 * (1 + math.cos(math.pi * metrics["step"] / 8)) / 2, abs=1e-12)
    times = [metrics["seconds"] for metrics in fitted.history]
    assert times == sorted(times)


def test_the_gradient_norm_of_a_site_is_the_mean_since_the_last_evaluation_before_clipping():
    plan, recipe = METHODS["dcr"](sites=SITES, schedule=segue.schedules.Linear()), Recipe(steps=4, lr=1e-2, clip=1e-3)
    fitted = fit(Net(), plan, recipe=recipe, evaluations=2)
    model = Net()
    torch.manual_seed(0)
    handover = segue.replace_(model.train(), plan, total_steps=4)
    optimizer = recipe.optimizer(handover.named_parameters())
    norms = []
    for x, y in CountedBatches().batches[:4]:
        F.cross_entropy(model(x), y).backward()
        sites = [torch.cat([p.grad.flatten() for p in seam.student.parameters()]).norm() for seam in handover.seams.values()]
        norms.append(torch.stack(sites))
        nn.utils.clip_grad_norm_(handover.parameters(), 1e-3)
        recipe.set_rate(optimizer, handover.steps_done, 4)
        optimizer.step()
        optimizer.zero_grad()
        handover.step()
    for metrics, wanted in zip(fitted.history[1:], (norms[:2], norms[2:]), strict=True):
        assert list(metrics["gradient_norm"]) == list(handover.seams)
        torch.testing.assert_close(torch.tensor(list(metrics["gradient_norm"].values())), torch.stack(wanted).mean(0))


def test_parts_of_the_loss_and_drawn_gates_are_means_since_the_last_evaluation():
    plan = METHODS["theseus"](sites=SITES, guidance=segue.losses.FeatureGuidance())
    fitted = fit(Net(), plan, steps=6, evaluations=2)
    assert not {"losses", "weights", "rises"} & set(fitted.history[0])
    handover = segue.replace_(Net(), plan, total_steps=6)
    drawn = []
    for _ in range(6):
        drawn.append(handover.weights)
        handover.step()
    for metrics, steps in zip(fitted.history[1:], (drawn[:3], drawn[3:]), strict=True):
        assert metrics["weights"] == {name: sum(step[name] for step in steps) / 3 for name in handover.seams}
        assert {"task"} <= set(metrics["losses"]) <= {"task", "guidance"}  # which ends with the handover
        assert sum(metrics["losses"].values()) == pytest.approx(metrics["loss"], rel=1e-6)
    assert fitted.history[1]["losses"]["guidance"] > 0
    assert {weight for step in drawn for weight in step.values()} == {0.0, 1.0}  # coins


def test_steps_in_which_alpha_rises_are_counted_by_site():
    rises = segue.schedules.Piecewise(points=((0.0, 1.0), (0.25, 0.5), (0.5, 0.9), (1.0, 0.0)))
    fitted = fit(Net(), METHODS["dcr"](sites=SITES, schedule=rises), steps=8, evaluations=2)
    assert fitted.history[1]["rises"] == {f"blocks.{i}.attn": 2 for i in range(3)}
    assert "rises" not in fitted.history[2]


class Drawing(CountedBatches):
    """Batches that draw from every global random state as they are read."""

    def __iter__(self):
        for x, y in self.batches:
            yield x + torch.rand(()) + random.random() + numpy.random.rand(), y


@pytest.mark.parametrize("method", ["dcr_dfg", "theseus", "distillation"])
def test_more_evaluations_do_not_change_what_is_learned(method):
    plan = METHODS[method](sites=SITES)
    held_out = DataLoader(TensorDataset(*batch(60, size=6)), batch_size=4, shuffle=True)

    class Noise(Drawing):
        def __iter__(self):
            yield from held_out
            yield from super().__iter__()

    models = [Net(dropout=0.3) for _ in range(3)]
    for model, evaluations, validation in zip(models, (1, 10, 1), (Noise(), Noise(), None), strict=True):
        random.seed(1)
        numpy.random.seed(1)
        fit(model, plan, Drawing(), steps=10, evaluations=evaluations, validation=validation)
    for model in models[1:]:
        assert same_state(model.state_dict(), models[0].state_dict())


@pytest.mark.parametrize(
    ("evaluations", "steps"), [(2, [0, 4, 8]), (3, [0, 3, 5, 8]), ((5, 1), [0, 1, 5, 8]), ((8,), [0, 8]), (100, list(range(9)))]
)
def test_evaluations_come_at_even_distances_or_at_given_steps(evaluations, steps):
    assert [metrics["step"] for metrics in fit(steps=8, evaluations=evaluations).history] == steps


def test_a_cut_last_line_of_the_metrics_is_left_out_and_any_other_damage_refused(tmp_path):
    log, path = MetricsLog(tmp_path, writes=True), tmp_path / "metrics.jsonl"
    good = b'{"step": 0}\n{"step": 2}\n'
    for rest in (b"", b'{"step": 4', b"\xff\xfe", b"{}", b"[1]", b"1e999"):
        path.write_bytes(good + rest)
        log.rewind(3)
        assert log.history == [{"step": 0}, {"step": 2}]
        assert path.read_bytes() == good
    for damaged in (b"\xff\xfe\n", b"{}\n", b"[\n", b'{"step": "2"}\n', b"null\n", b"\n", b"[" * 100_000 + b"\n"):
        path.write_bytes(damaged + good)
        with pytest.raises(CheckpointError, match="metrics.jsonl cannot be read.\n  Line 1 is damaged"):
            log.rewind(3)
        assert path.read_bytes() == damaged + good


def test_more_evaluations_than_steps_cost_no_time():
    assert evaluation_steps(10**30, 3) == {1, 2, 3}


def test_metrics_are_json_lines_and_go_to_trackers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plan = METHODS["dcr"](sites=SITES)
    fitted = fit(Net(), plan, steps=4, evaluations=2, validation=VALIDATION, folder=tmp_path, trackers=["tensorboard"])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == fitted.history
    (written,) = {path.parent for path in tmp_path.glob("**/events.out.tfevents*") if path.parent.name == "segue"}
    events = EventAccumulator(str(written)).Reload()
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert [step for step, _ in found["alpha"]] == [0, 2, 4]
    cosines = [metrics["cosine"]["blocks.1.attn"] for metrics in fitted.history]
    assert [value for _, value in found["cosine/blocks.1.attn"]] == pytest.approx(cosines, rel=1e-6)
    assert [value for _, value in found["students/accuracy"]][-1] == pytest.approx(fitted.history[-1]["students"]["accuracy"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device of a full disk is Linux's")
def test_metrics_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(CheckpointError) as caught:
        MetricsLog(tmp_path, writes=True).add({"step": 0})
    assert str(caught.value).splitlines()[:2] == [
        f"{tmp_path / 'metrics.jsonl'} cannot be written.",
        "  No space left on device.",
    ]
