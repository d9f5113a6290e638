"""A rehearsal: times of phases, a model that is as it was, and evaluations that a run can afford."""

import time

import pytest

import segue
from segue.convert import recipes
from segue.convert.convert import Run
from segue.convert.data import load
from segue.convert.options import Conversion
from segue.convert.pretrained import open_base
from segue.convert.rehearsal import PASSES, SHARE, Rehearsal, affordable, estimate, rehearse
from segue.convert.tasks import NextToken
from segue.training.distributed import launched
from tests.convert.small_models import ATTENTION, STUDENT
from tests.helpers.tiny import same_state


@pytest.mark.parametrize("run", [0.1, 1.0, 60.0, 1800.0, 1e5])
@pytest.mark.parametrize("batch", [0.01, 0.3, 5.0])
@pytest.mark.parametrize("batches", [1, 8, 32])
@pytest.mark.parametrize("further", [(), (3,), (1, 40)])
def test_evaluations_cost_at_most_a_tenth_unless_one_batch_at_each_end_does(run, batch, batches, further):
    number, used = affordable(run, batch, batches, further)
    longest = max(batches, *further, 1)
    assert 1 <= number <= 10
    assert 1 <= used <= longest

    def cost(used):  # blend and students, each with the original, and students with the original on further files
        return (number + 1) * batch * (PASSES * min(used, batches) + 2 * sum(min(used, each) for each in further))

    assert (number, used) == (1, 1) or cost(used) <= SHARE * (run + cost(used)) * (1 + 1e-9)
    if used < longest:  # one more batch in each would be too much
        assert cost(used + 1) > SHARE / (1 - SHARE) * run * (1 - 1e-9)


class Slow(NextToken):
    """A task that takes a known time, except where the forward ends before its logits."""

    def logits(self, model, batch):
        logits = super().logits(model, batch)
        time.sleep(0.3)
        return logits


@pytest.fixture
def conversion(base, texts):
    def made(method):
        needed = {"model": str(base("llama")), "sites": ATTENTION["llama"], "student": STUDENT, "data": str(texts)}
        settings = Conversion(**needed, method=method, steps=10, batch=4, tokens=16)
        llama = open_base(settings.model)
        plan = recipes.plan_of(settings, llama)
        return llama, plan, load(llama, settings), recipes.recipe_of(settings, llama, plan)

    return made


def test_each_phase_is_timed_and_the_model_is_as_before(conversion):
    llama, plan, data, recipe = conversion("transfer(hold=0.4)")
    before = {name: value.clone() for name, value in llama.model.state_dict().items()}
    data.task = Slow()
    found = rehearse(llama.model, plan, data, recipe)
    assert {name: steps for name, (steps, _) in found.seconds.items()} == {"transfer": 4, "students alone": 6}
    assert found.seconds["transfer"][1] < 0.3 <= found.seconds["students alone"][1] < 0.6
    assert found.total == pytest.approx(sum(steps * one for steps, one in found.seconds.values()))
    assert same_state(llama.model.state_dict(), before)
    assert not llama.model.training
    assert not any(type(module).__name__ == "Seam" for module in llama.model.modules())


def test_operations_are_those_of_segue_cost_on_whole_batches(conversion):
    llama, plan, data, recipe = conversion("dcr_dfg")
    found = rehearse(llama.model, plan, data, recipe, saves=True)
    assert list(found.seconds) == ["steps"]
    assert found.checkpoint > 4 * sum(p.numel() for p in llama.model.model.layers[0].self_attn.parameters())
    taken = estimate(llama.model, plan, data, recipe, found, llama.dtype)
    counted = segue.cost(llama.model, plan, next(iter(data.train)), total_steps=10, loss_fn=data.task)
    assert taken["flops"] == pytest.approx(counted.flops, rel=1e-6)
    assert taken["weights"] == 4 * sum(p.numel() for p in llama.model.parameters())


@pytest.mark.parametrize("given", [1, 2, 3, 99])
def test_batches_of_an_evaluation_that_are_given_stay_so_that_the_same_command_resumes(given, conversion):
    llama, plan, data, recipe = conversion("dcr_dfg")
    data.held_out = list(range(3))
    settings = Conversion(model="m", data="d", steps=10, eval_batches=given)
    run = Run(settings, llama, data, plan, recipe, launched(), timed=True)
    said = run._budget(100.0, Rehearsal(seconds={"steps": (10, 0.001)}, checkpoint=None))  # far too much for a tenth
    assert (run.settings.eval_batches, run.settings.evaluations) == (given, 1)
    assert f"on {min(given, 3)} of 3 batches" in said


def test_further_files_count_in_what_evaluations_cost(conversion):
    llama, plan, data, recipe = conversion("dcr_dfg")
    data.held_out, data.evaluated_on = list(range(3)), {"a.txt": list(range(9)), "b.txt": list(range(2))}
    rehearsed = Rehearsal(seconds={"steps": (10, 100.0)}, checkpoint=None)
    run = Run(Conversion(model="m", data="d", steps=10, evaluations=4), llama, data, plan, recipe, launched(), timed=True)
    said = run._budget(3.0, rehearsed)  # a second for a batch: 3 in 4 passes, 11 in 2
    assert "5 evaluations on 3 of 3 batches and 11 of 11 of 2 further files, 34 s each, 15% of the run" in said
    run = Run(Conversion(model="m", data="d", steps=10), llama, data, plan, recipe, launched(), timed=True)
    said = run._budget(3.0, rehearsed)
    number, used = run.settings.evaluations, run.settings.eval_batches
    assert (number + 1) * (PASSES * min(used, 3) + 2 * (used + min(used, 2))) <= 1000 * SHARE / (1 - SHARE)
    assert f"{number + 1} evaluations on {min(used, 3)} of 3 batches and {used + min(used, 2)} of 11 of 2" in said
