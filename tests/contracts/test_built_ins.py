"""What every built-in must do. A new gate, schedule, guidance or student joins by existing."""

import dataclasses
import json
import math

import pytest
import torch

import segue
from segue import gates, losses, schedules, students
from segue.gates import Noise
from segue.plan import decode, encode
from segue.sites import Site
from tests.helpers.tiny import SITES, Net, batch, constant, optimizer_for, same_bits, same_state, start, train
from tests.students import cases
from tests.students.attention import tiny_attention  # noqa: F401  registers the attention of tiny.Net
from tests.vocabulary import test_gates, test_losses, test_schedules

REQUIRED: dict[type, dict[str, object]] = {}  # the settings without a default, from the tests of each module
for tests in (test_gates, test_schedules, test_losses):
    REQUIRED |= getattr(tests, "REQUIRED", {})
SITES_IN_A_ROW = [Site(f"blocks.{i}.attn", index=i, count=3) for i in range(3)]


def built_ins(room) -> list[object]:
    kinds = [x for name, x in vars(room).items() if dataclasses.is_dataclass(x) and not name.startswith("_")]
    own = [kind for kind in kinds if kind.__module__.startswith(room.__name__) and kind is not Noise]
    return [kind(**REQUIRED.get(kind, {})) for kind in own]


GATES = built_ins(gates)
SCHEDULES = built_ins(schedules)
GUIDANCES = [loss for loss in built_ins(losses) if not isinstance(loss, losses.LogitDistillation)]
STUDENTS = [students.Reinit(), *cases.ONE_OF_EACH]


def test_they_were_found():
    assert len(GATES) >= 3
    assert len(SCHEDULES) >= 7
    assert len(GUIDANCES) >= 5
    assert len(STUDENTS) >= 9


@pytest.mark.parametrize("part", [*GATES, *SCHEDULES, *GUIDANCES, *STUDENTS], ids=repr)
def test_its_repr_is_its_configuration_and_it_saves_as_data(part):
    assert decode(json.loads(json.dumps(encode(part))), "part") == part
    assert repr(part).startswith(type(part).__name__ + "(")
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
        part.weight = 2.0


@pytest.mark.parametrize("gate", GATES, ids=repr)
def test_a_gate_gives_weights_and_exact_endpoints(gate):
    for noise in (None, *(Noise(0, step, "s") for step in range(20))):
        assert (gate(1.0, noise), gate(0.0, noise)) == (0.0, 1.0)
        assert all(0 <= gate(alpha / 16, noise) <= 1 for alpha in range(17))


@pytest.mark.parametrize("gate", GATES, ids=repr)
def test_a_gates_mean_is_the_mean_of_its_draws(gate):
    for alpha in (0.2, 0.7):
        draws = [gate(alpha, Noise(1, step, "s")) for step in range(8000)]
        assert sum(draws) / len(draws) == pytest.approx(gate(alpha, None), abs=4 * 0.5 / math.sqrt(8000))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_schedule_is_pure_and_stays_from_0_to_1(schedule):
    for site in SITES_IN_A_ROW:
        there = [schedules.alpha_at(schedule, step / 50, site) for step in range(51)]
        back = [schedules.alpha_at(schedule, step / 50, site) for step in reversed(range(51))]
        assert there == back[::-1]


@pytest.mark.parametrize("gate", GATES, ids=repr)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_every_gate_runs_every_schedule(schedule, gate):
    signal = losses.FeatureGuidance() if schedules.is_adaptive(schedule) else None
    handover = start(segue.Plan(sites=SITES, schedule=schedule, gate=gate, guidance=signal), total_steps=6)
    assert all(map(math.isfinite, train(handover, optimizer_for(handover), 6)))


@pytest.mark.parametrize("gate", GATES, ids=repr)
@pytest.mark.parametrize("guidance", GUIDANCES, ids=repr)
def test_every_guidance_joins_every_gate(guidance, gate):
    handover = start(segue.Plan(sites=SITES, guidance=guidance, gate=gate), total_steps=10)
    handover.model(batch()[0])
    gradients = torch.autograd.grad(handover.aux_loss(), list(handover.parameters()), allow_unused=True)
    assert all(g is not None and g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("student", STUDENTS, ids=repr)
class TestStudent:
    def plan(self, student) -> segue.Plan:
        return segue.Plan(sites=SITES, student=student, schedule=constant(0.5))

    def test_it_verifies_and_trains(self, student):
        handover = start(self.plan(student))
        optimizer = optimizer_for(handover)
        handover.verify(batch()[0], optimizer=optimizer)
        losses = train(handover, optimizer, 8)
        assert all(map(math.isfinite, losses))

    @pytest.mark.slow
    def test_it_compiles_as_one_graph(self, student):
        torch._dynamo.reset()
        handover = start(self.plan(student), depth=1)
        x, _ = batch()
        expected = handover.model(x)
        compiled = torch.compile(handover.model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), expected)

    def test_it_runs_in_bfloat16_and_under_autocast(self, student):
        handover = start(self.plan(student))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            handover.model(batch()[0]).float().sum().backward()
        assert all(p.grad.isfinite().all() for p in handover.parameters())
        half = start(self.plan(student)).model.bfloat16()
        assert half(batch()[0].bfloat16()).isfinite().all()

    def test_it_finalizes_saves_and_loads(self, student, tmp_path):
        handover = start(self.plan(student))
        train(handover, optimizer_for(handover), 2)
        model = handover.finalize_(force=True).eval()
        segue.save(model, tmp_path)
        fresh = segue.load_(Net(seed=3).eval(), tmp_path)
        assert same_bits(fresh(batch()[0]), model(batch()[0]))

    def test_it_resumes_bit_for_bit(self, student, tmp_path):
        plan = segue.Plan(sites=SITES, student=student, guidance=losses.FeatureGuidance())
        whole = start(plan)
        optimizer = optimizer_for(whole)
        train(whole, optimizer, 1)
        segue.save(whole, tmp_path, optimizer=optimizer)
        expected = train(whole, optimizer, 2)
        again = start(plan)
        optimizer = optimizer_for(again)
        segue.load_(again, tmp_path, optimizer=optimizer)
        assert train(again, optimizer, 2) == expected
        assert same_state(again.model.state_dict(), whole.model.state_dict())
