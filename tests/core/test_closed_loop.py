"""The closed loop: the rule on plain numbers, its signal in a running handover, and its state in checkpoints."""

import copy
import dataclasses
import json
import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import segue
from segue import similarity
from segue.checkpoint import folders
from segue.checkpoint import state as checkpoint
from segue.core.closed_loop import ClosedLoop, Reading, SiteLoop, advance
from segue.errors import CheckpointError, PlanError
from segue.gates import Bernoulli
from segue.losses import (
    CosineGuidance,
    FeatureAxis,
    FeatureGuidance,
    LogitDistillation,
    OnTeacherStream,
    PredictionDistillation,
)
from segue.phases import Phase
from segue.schedules import Adaptive, Constant, Hold, Linear, PerSite, aggr20
from tests.helpers.tiny import SITES, Net, batch, optimizer_for, same_state, start, train

NAMES = [f"blocks.{i}.attn" for i in range(3)]
SETTINGS = Adaptive(budget=0.2, divergence=1.0, fastest=0.1, spike=1.5, back=0.05, memory=0.01)


def plan(schedule=None, **settings) -> segue.Plan:
    schedule = schedule or Adaptive(every=1, until=0.5, budget=0.3)
    return segue.Plan(**{"sites": SITES, "schedule": schedule, "guidance": FeatureGuidance(), **settings})


def step(loop: SiteLoop, error: float | None, divergence: float | None = None, latest: float = 1.0) -> SiteLoop:
    """Advance by a hundredth of the run: at full pace alpha falls by 0.1. `error` is a root, as in the settings."""
    reading = Reading(error=None if error is None else error**2, divergence=divergence)
    return advance(SETTINGS, loop, reading, loop.progress + 0.01, latest)


class Own:
    """A schedule with a state, as a user writes one."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def __call__(self, progress, site):
        return self.alpha

    def state_dict(self):
        return {"alpha": self.alpha}

    def load_state_dict(self, state):
        self.alpha = state["alpha"]


class TestRule:
    def test_it_falls_at_its_pace_while_the_blend_is_within_the_budget(self):
        assert step(SiteLoop(), 0.1).alpha == pytest.approx(0.9)
        assert step(SiteLoop(pace=0.5), 0.1).alpha == pytest.approx(0.95)

    def test_it_falls_no_further_than_the_budget_allows(self):
        loop = SiteLoop()
        for _ in range(20):
            loop = step(loop, 0.4)
        assert (1 - loop.alpha) * 0.4 == pytest.approx(0.2)
        for _ in range(20):
            loop = step(loop, 0.25)
        assert (1 - loop.alpha) * 0.25 == pytest.approx(0.2)

    def test_it_reaches_exactly_zero_and_stays_there(self):
        loop = SiteLoop()
        for _ in range(11):
            loop = step(loop, 0.19)
        assert loop.alpha == 0.0
        assert step(SiteLoop(alpha=0.14), 0.205).alpha == 0.0  # not 0.04, which is not worth a teacher
        for error in (5.0, math.nan, math.inf):
            assert step(loop, error).alpha == 0.0

    def test_it_waits_above_the_budget_and_while_the_error_rises(self):
        assert step(SiteLoop(alpha=0.5), 0.5).alpha == 0.5
        assert step(SiteLoop(alpha=0.8, error=0.09), 0.345).alpha == 0.8
        assert step(SiteLoop(alpha=0.8, error=0.09), 0.315).alpha == pytest.approx(0.7)

    def test_after_a_spike_it_takes_a_little_back_and_is_slower_for_a_while(self):
        calm = SiteLoop(alpha=0.3, error=0.04)
        loop = step(calm, 0.5)
        assert (loop.alpha, loop.pace) == (pytest.approx(0.35), 0.5)
        after = step(dataclasses.replace(loop, error=0.01), 0.1)
        assert after.alpha == pytest.approx(0.30)
        assert 0.5 < after.pace < 1.0
        assert step(SiteLoop(alpha=0.99, error=0.04), 50.0).alpha == 1.0

    def test_a_jump_of_a_student_that_is_within_the_budget_alone_does_not_matter(self):
        loop = step(SiteLoop(alpha=0.3, error=0.0001), 0.1)
        assert (loop.alpha, loop.pace) == (pytest.approx(0.2), 1.0)

    @pytest.mark.parametrize("error", [math.nan, math.inf, 0.0])
    def test_a_first_reading_may_be_anything(self, error):
        loop = step(SiteLoop(), error)
        assert (loop.alpha, loop.error) == ((1.0, None) if error else (pytest.approx(0.9), 0.0))

    @pytest.mark.parametrize("error", [math.nan, math.inf])
    def test_what_is_not_finite_is_a_spike_and_not_part_of_the_mean(self, error):
        loop = step(SiteLoop(alpha=0.3, error=0.01), error)
        assert (loop.alpha, loop.error) == (pytest.approx(0.35), 0.01)

    def test_without_a_measurement_it_waits_for_the_deadline(self):
        assert step(SiteLoop(alpha=0.3), None).alpha == 0.3
        assert step(SiteLoop(alpha=0.3), None, latest=0.2).alpha == 0.2

    def test_the_deadline_is_above_everything(self):
        assert step(SiteLoop(alpha=0.3, error=0.01), 5.0, latest=0.2).alpha == 0.2

    def test_a_divergence_of_the_logits_stops_every_site(self):
        assert step(SiteLoop(alpha=0.5), 0.01, divergence=1.1).alpha == 0.5
        assert step(SiteLoop(alpha=0.5), 0.01, divergence=0.9).alpha == pytest.approx(0.4)
        assert step(SiteLoop(alpha=0.5, divergence=0.5), 0.01, divergence=2.0).alpha == pytest.approx(0.55)

    def test_means_run_over_progress(self):
        loop = step(step(SiteLoop(), 0.4), 0.2)
        assert loop.error == pytest.approx((0.16 + 0.04) / 2)  # memory is as long as the step
        assert loop.progress == 0.02

    def test_a_lengthened_run_moves_nothing_at_once(self):
        loop = advance(SETTINGS, SiteLoop(alpha=0.5, progress=0.4, error=0.01), Reading(error=0.04), 0.2, 1.0)
        assert (loop.alpha, loop.progress, loop.error) == (0.5, 0.2, 0.01)


class TestSignal:
    @pytest.mark.parametrize(
        "guidance",
        [
            FeatureGuidance(weight=0.3),
            FeatureGuidance(scale="paper"),
            FeatureAxis(axis=-1, then=CosineGuidance()),
            lambda teacher, student, mask: (teacher - student).abs().mean(),
        ],
        ids=["relative", "paper", "axis", "own"],
    )
    def test_it_is_the_relative_error_of_the_students_whatever_guides_them(self, guidance):
        handover = start(plan(guidance=guidance))
        pairs = {}
        for name, seam in handover.seams.items():
            teacher, student, inputs = copy.deepcopy(seam.teacher), copy.deepcopy(seam.student), []
            handover.model.get_submodule(name.rpartition(".")[0]).norm.register_forward_hook(
                lambda module, args, output, kept=inputs: kept.append(output)
            )
            pairs[name] = teacher, student, inputs
        train(handover, optimizer_for(handover), 1)
        for name, (teacher, student, (x,)) in pairs.items():
            expected = similarity.relative_error(teacher(x), student(x)).mean().item()
            assert handover.closed_loop.sites[name].error == pytest.approx(expected, rel=1e-5)

    def test_it_is_a_mean_over_the_samples_of_all_micro_batches(self):
        whole, parts = start(plan()), start(plan())
        x, _ = batch(size=8)
        whole.model(x).sum()
        whole.aux_loss()
        for part in (x[:2], x[2:]):
            parts.model(part)
            parts.aux_loss()
        for handover in (whole, parts):
            handover.step()
        for name in NAMES:
            found, expected = (h.closed_loop.sites[name].error for h in (parts, whole))
            assert found == pytest.approx(expected, rel=1e-5)

    def test_the_divergence_is_the_value_of_the_distillation_without_its_weight(self):
        handover = start(plan(distill=LogitDistillation(weight=0.1)))
        train(handover, optimizer_for(handover), 2)
        x, _ = batch(2)
        handover.model(x)
        value = handover.losses()["distill"].item() / 0.1
        before = handover.closed_loop.sites[NAMES[0]].divergence
        handover.step()
        after = handover.closed_loop.sites[NAMES[0]].divergence
        assert after == pytest.approx(before + (value - before) * 0.1 / 0.11, rel=1e-4)
        other = start(plan(distill=PredictionDistillation()))
        train(other, optimizer_for(other), 2)
        assert other.closed_loop.sites[NAMES[0]].divergence is None

    def test_it_is_read_every_few_steps_and_not_after_takeover(self):
        handover = start(plan(Adaptive(every=3, budget=100, fastest=0.2)), total_steps=20)
        read = []
        for _ in range(12):
            read.append(bool(handover.auxiliary.measured))
            train(handover, optimizer_for(handover), 1)
        assert read == [False, False, True, False, False, True] + 6 * [False]
        assert set(handover.alphas.values()) == {0.0}

    def test_the_teachers_own_stream_is_a_signal_too(self):
        handover = start(plan(guidance=OnTeacherStream()))
        train(handover, optimizer_for(handover), 1)
        assert all(loop.error > 0 for loop in handover.closed_loop.sites.values())

    def test_guidance_lasts_as_long_as_alpha_and_is_never_below_it(self):
        handover = start(plan(Adaptive(until=1.0), guidance=FeatureGuidance(weight=2.0)), total_steps=10)
        for _ in range(10):
            for name, site in handover.state.sites.items():
                aggr20 = segue.schedules.aggr20()(handover.progress, handover.sites[0])
                assert site.guidance == 2 * max(aggr20, handover.alphas[name])
            train(handover, optimizer_for(handover), 1)
        assert {site.guidance for site in handover.state.sites.values()} == {0.0}


class TestRunning:
    @pytest.mark.parametrize("gate", [segue.gates.Blend(), Bernoulli()], ids=repr)
    def test_alpha_is_never_above_the_deadline_and_exactly_zero_at_it(self, gate):
        handover = start(plan(Adaptive(until=0.5, budget=1e-6, every=1), gate=gate), total_steps=20)
        for _ in range(20):
            train(handover, optimizer_for(handover), 1)
            line = handover.plan.schedule(handover.progress, handover.sites[0])
            assert all(line - 1e-5 < alpha <= line for alpha in handover.alphas.values())
        assert set(handover.alphas.values()) == {line} == {0.0}
        handover.finalize_()

    def test_each_site_has_a_pace_of_its_own(self):
        def student(teacher, site):
            made = copy.deepcopy(teacher).requires_grad_(True)
            if site.index == 1:
                with torch.no_grad():
                    made.proj.weight.mul_(5)
            return made

        handover = start(plan(Adaptive(every=1, budget=0.1), student=student), total_steps=40)
        train(handover, torch.optim.SGD(handover.parameters(), lr=1e-6), 4)
        first, second, third = handover.alphas.values()
        assert first == third == 0.0 < 0.9 < second < 1.0

    def test_a_lengthened_run_keeps_what_was_reached(self):
        handover = start(plan(Adaptive(until=0.5, budget=1e-6, every=1)), total_steps=8)
        train(handover, optimizer_for(handover), 3)
        reached = handover.alphas
        assert set(reached.values()) == {0.5}
        handover.total_steps = 80
        assert handover.alphas == reached
        handover.total_steps = 4
        assert set(handover.alphas.values()) == {0.0}
        handover.total_steps = 80  # nothing was trained at 0
        assert handover.alphas == reached
        handover.total_steps = 6
        train(handover, optimizer_for(handover), 1)
        handover.total_steps = 80
        assert set(handover.alphas.values()) == {0.0}

    def test_a_teacher_is_released_when_its_own_site_has_reached_zero(self):
        handover = start(plan(Adaptive(every=1, budget=100, fastest=0.1), release=True), total_steps=10)
        gone = []
        for _ in range(3):
            train(handover, optimizer_for(handover), 1)
            gone.append([seam.teacher is None for seam in handover.seams.values()])
        assert gone == [[False] * 3, [True] * 3, [True] * 3]  # aggr20 guides for the second step

    def test_it_runs_inside_other_schedules(self):
        eager = Adaptive(every=1, budget=100, fastest=0.25)
        local = start(plan(Hold(fraction=0.5, then=eager)), total_steps=8)
        mixed = start(plan(PerSite(schedules={NAMES[0]: eager}, otherwise=Linear())), total_steps=8)
        seen = []
        for _ in range(6):
            train(local, optimizer_for(local), 1)
            train(mixed, optimizer_for(mixed), 1)
            seen.append((local.alphas[NAMES[0]], mixed.alphas[NAMES[0]], mixed.alphas[NAMES[1]]))
        assert seen == [(1, 0.5, 0.875), (1, 0, 0.75), (1, 0, 0.625), (1, 0, 0.5), (0, 0, 0.375), (0, 0, 0.25)]

    def test_it_runs_in_a_phase_by_its_progress_and_from_the_alpha_before_it(self):
        local = Phase(name="local", length=0.5, local=True)
        before = Phase(name="before", length=0.25, schedule=Linear(end=0.75))
        eager = Phase(name="eager", length=0.25, schedule=Adaptive(every=1, budget=100, fastest=1.0, until=0.5))
        handover = start(plan(aggr20(), phases=(local, before, eager)), total_steps=16)
        seen = []
        for _ in range(16):
            guidance = {site.guidance for site in handover.state.sites.values()}
            assert guidance == set(handover.alphas.values())  # as a phase asks by default
            train(handover, optimizer_for(handover), 1)
            seen.append(handover.alphas[NAMES[0]])
        assert seen[:12] == [1.0] * 8 + [0.9375, 0.875, 0.8125, 0.8125]
        assert seen[12:] == pytest.approx([0.5625, 0.0, 0.0, 0.0])

    @pytest.mark.slow
    def test_one_graph_while_it_moves(self):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        settings = plan(Adaptive(every=1, budget=100, fastest=0.4, until=1.0), guidance=FeatureGuidance(schedule=Constant()))
        runs = [start(settings, total_steps=10) for _ in range(2)]
        call = torch.compile(runs[1].model, fullgraph=True, backend=counter)
        graphs, alphas = [], []
        for _ in range(6):
            for run, forward in zip(runs, (runs[0].model, call), strict=True):
                (forward(batch()[0]).square().mean() + run.aux_loss()).backward()
                run.step()
            graphs.append(counter.frame_count)
            alphas.append(runs[1].alphas[NAMES[0]])
        assert runs[0].alphas == runs[1].alphas
        assert alphas == pytest.approx([0.75, 0.5, 0.25, 0.0, 0.0, 0.0])
        assert graphs == [1, 1, 1, 1, 2, 2]


SILENT = Phase(name="silent", schedule=Adaptive(), guidance=0.0)
STRANGE = Phase(name="strange", distill=Adaptive())


class TestRefused:
    @pytest.mark.parametrize(
        ("settings", "says"),
        [
            ({"guidance": None}, "Adaptive needs guidance.\n  The plan has none"),
            ({"guidance": FeatureGuidance(weight=0.0)}, "Adaptive needs guidance.\n  The plan has none"),
            ({"phases": (SILENT,)}, "Adaptive needs guidance.\n  That of the phase 'silent' is 0."),
            ({"phases": (STRANGE,)}, "Adaptive cannot be the schedule of Phase('strange', distill=...)."),
            ({"schedule": Hold(fraction=0.2, then=Adaptive()), "guidance": None}, "Adaptive needs guidance."),
            ({"guidance": FeatureGuidance(schedule=Adaptive())}, "Adaptive cannot be the schedule of guidance."),
            ({"distill": LogitDistillation(schedule=Adaptive())}, "Adaptive cannot be the schedule of distill."),
        ],
        ids=["no guidance", "weight 0", "phase", "strength", "inside", "guidance", "distill"],
    )
    def test_before_anything_changes(self, settings, says):
        model = Net()
        before = repr(model)
        with pytest.raises(PlanError) as error:
            segue.replace_(
                model, plan(**{**({"schedule": aggr20()} if "phases" in settings else {}), **settings}), total_steps=3
            )
        assert str(error.value).startswith(says)
        assert len(str(error.value).splitlines()) == 3
        assert repr(model) == before


FORGED = [math.nan, math.inf, -0.5, 10**39, "x", [], {}, True, 1]


class TestState:
    def saved(self, folder, steps=5) -> folders.Checkpoint:
        handover = start(plan(distill=LogitDistillation()))
        optimizer = optimizer_for(handover)
        train(handover, optimizer, steps)
        segue.save(handover, folder, optimizer=optimizer)
        return folders.read(folder)

    @pytest.mark.parametrize("stop", [3, 6])
    def test_a_run_resumes_bit_for_bit(self, stop, tmp_path):
        settings = plan(Adaptive(every=2, budget=0.5, until=0.5), distill=LogitDistillation(), gate=Bernoulli())
        straight = start(settings, total_steps=20)
        optimizer = optimizer_for(straight)
        train(straight, optimizer, stop)
        segue.save(straight, tmp_path, optimizer=optimizer)
        losses = train(straight, optimizer, 20 - stop)
        resumed = start(settings, total_steps=20)
        optimizer = optimizer_for(resumed)
        segue.load_(resumed, tmp_path, optimizer=optimizer)
        assert 0 < resumed.alphas[NAMES[0]] < 1
        assert train(resumed, optimizer, 20 - stop) == losses
        assert resumed.closed_loop.state_dict() == straight.closed_loop.state_dict()
        assert same_state(resumed.model.state_dict(), straight.model.state_dict())

    def test_it_is_plain_data_and_a_copy_has_its_own(self, tmp_path):
        state = self.saved(tmp_path).state["schedule"]
        assert json.loads(json.dumps(state)) == state
        assert list(state) == NAMES
        handover = start(plan())
        twin = copy.deepcopy(handover)
        train(handover, optimizer_for(handover), 2)
        assert set(twin.closed_loop.alphas.values()) == {1.0}

    @pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(SiteLoop)])
    def test_a_forged_number_is_refused_and_changes_nothing(self, field, tmp_path):
        saved, target = self.saved(tmp_path), start(plan(distill=LogitDistillation()))
        before = target.closed_loop.state_dict(), target.describe()
        known = saved.state["schedule"][NAMES[1]]
        was = known[field]
        optional = field in ("error", "divergence")
        for value in [*FORGED, *([] if optional else [None, 1.5])]:
            known[field] = value
            with pytest.raises(CheckpointError) as error:
                checkpoint.restore_handover_(target, saved._replace(tensors=dict(saved.tensors)))
            assert len(str(error.value).splitlines()) == 3
            assert (target.closed_loop.state_dict(), target.describe()) == before
        known[field] = was
        checkpoint.restore_handover_(target, saved)
        assert target.closed_loop.state_dict() == saved.state["schedule"]

    @pytest.mark.parametrize("state", [None, {}, [], "x", {NAMES[0]: {}}, {name: {} for name in NAMES}, dict.fromkeys(NAMES)])
    def test_a_forged_state_is_refused(self, state, tmp_path):
        saved, target = self.saved(tmp_path), start(plan(distill=LogitDistillation()))
        saved.state["schedule"] = state
        with pytest.raises(CheckpointError):
            checkpoint.restore_handover_(target, saved)
        assert set(target.closed_loop.alphas.values()) == {1.0}

    def test_another_schedule_may_take_its_place_and_it_the_place_of_another(self, tmp_path):
        self.saved(tmp_path)
        fixed = start(plan(Linear(), distill=LogitDistillation()))
        segue.load_(fixed, tmp_path, allow_changes=("plan.schedule",))
        assert set(fixed.alphas.values()) == {0.5}
        segue.save(fixed, tmp_path / "fixed")
        adaptive = start(plan(Adaptive(until=0.8), distill=LogitDistillation()))
        segue.load_(adaptive, tmp_path / "fixed", allow_changes=("plan.schedule",))
        assert set(adaptive.alphas.values()) == {0.75}  # the deadline's

    @pytest.mark.filterwarnings("ignore:the plan's schedule")
    def test_it_may_take_the_place_of_a_schedule_of_ones_own_that_has_a_state_and_the_other_way_round(self, tmp_path):
        own = Own(0.4)
        segue.save(start(plan(own)), tmp_path / "own")
        adaptive = start(plan())
        segue.load_(adaptive, tmp_path / "own", allow_changes=("plan.schedule",))
        assert set(adaptive.alphas.values()) == {1.0}
        segue.save(adaptive, tmp_path / "adaptive")
        own.alpha = 0.7
        segue.load_(start(plan(own)), tmp_path / "adaptive", allow_changes=("plan.schedule",))
        assert own.alpha == 0.7  # what a closed loop has measured is not its state
        segue.load_(start(plan(own)), tmp_path / "own")
        assert own.alpha == 0.4

    def test_a_plan_that_does_not_adapt_has_no_state(self):
        handover = start()
        assert handover.stateful_schedule is None
        assert ClosedLoop(handover.plan, handover.sites).state_dict() == {}
        assert handover.closed_loop.due(3, 10) == []
