"""plan_replacement: from a model and batches to a plan that every entry takes, and nothing is changed."""

import dataclasses
import itertools
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import segue
from segue.diagnostics.counting import flops
from segue.errors import CheckpointError, DataError, PlanError, StudentError
from segue.planning import Frontier, Quality, Saving, damage, planner
from segue.students import Drop, LinearAttention, NarrowMlp, SlidingWindow
from tests.convert import small_models
from tests.helpers import models
from tests.helpers.tiny import same_state
from tests.planning import cases
from tests.planning.test_damage import Noisy, Opaque, Unnamed

QUICK = {"fit_steps": 2, "subsets": 16, "progress": None}


def planned(case=cases.vit_parts, budget=None, **settings):
    model, batches, found = case()
    return segue.plan_replacement(model, batches, found["candidates"], budget, sites=found["sites"], **QUICK | settings)


@pytest.fixture(scope="module")
def found():
    return planned(budget=Saving(flops=0.3))


def test_it_says_an_operator_for_every_site(found):
    operators = found.operators()
    assert list(operators) == [f"blocks.{i}.{part}" for i in range(3) for part in ("attn", "mlp")]
    assert set(operators.values()) <= {"keep", "LinearAttention", "NarrowMlp(ratio=0.5)", "Drop(returns='zeros')"}
    assert [site for site, name in operators.items() if name != "keep"] == list(found.plan.sites)
    assert found.choice.saved["flops"] >= 0.3
    assert "| KL added | FLOPs |" in str(found)  # what the budget asks for, whatever is saved most
    assert "| KL added | train |" in str(dataclasses.replace(found, metric="train"))


def test_candidates_stand_only_where_they_fit(found):
    assert ("blocks.0.mlp", "LinearAttention") in found.refused
    assert ("blocks.0.attn", "NarrowMlp(ratio=0.5)") in found.refused
    assert len(found.prediction.options) == 12
    assert set(found.errors) == set(found.prediction.options)
    assert found.errors["blocks.0.mlp", "Drop(returns='zeros')"] == pytest.approx(1.0)


def test_the_plan_trains_and_finishes(found):
    model, batches, _ = cases.vit_parts()
    handover = segue.replace_(model.train(), found.plan, total_steps=4)
    optimizer = torch.optim.AdamW(handover.parameters(), lr=1e-3)
    for _ in range(4):
        (F.cross_entropy(model(batches[0]), torch.arange(4)) + handover.aux_loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        handover.step()
    finished = handover.finalize_()
    chosen = dict(found.choice.subset)
    for site in found.plan.sites:
        part = finished.get_submodule(site)
        assert (sum(p.numel() for p in part.parameters()) == 0) == (chosen[site] == "Drop(returns='zeros')")


def test_it_is_saved_as_a_plan_and_as_numbers(found, tmp_path):
    place = found.save(tmp_path)
    assert segue.Plan.from_dict(json.loads(place.read_text())) == found.plan
    numbers = json.loads((tmp_path / "planned.json").read_text())
    assert numbers["operators"] == found.operators()
    assert numbers["choice"]["kl"] == found.choice.kl
    assert len(numbers["quadratic"]) == len(numbers["options"]) == 12


def test_it_is_drawn_and_written_as_tables(found, tmp_path):
    assert [path.name for path in found.draw(tmp_path)] == ["frontier.png", "options.png", "pairs.png"]
    text = str(found)
    for part in (
        "| blocks.2.mlp |",
        "Replaced: ",
        "does not fit 3 sites (blocks.0.mlp first)",
        "held-out ones R2 is",
        "Damage is measured on 8 predictions",
        "strongest pairs",
    ):
        assert part in text


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_changed(training):
    model, batches, settings = cases.vit_parts()
    model.train(training)
    model.blocks[0].mlp.fc1.weight.requires_grad_(False)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    modules = [id(m) for m in model.modules()]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    segue.plan_replacement(model, batches, settings["candidates"], sites=settings["sites"], **QUICK)
    assert torch.equal(torch.rand(3), expected)
    assert same_state(model.state_dict(), before)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert [id(m) for m in model.modules()] == modules
    assert all(m.training is training for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_local_fit_lowers_the_error():
    short, long = (planned(fit_steps=steps, closed_form=False).errors for steps in (1, 30))
    assert all(long[option] < short[option] for option in short if "Drop" not in option[1])


def test_the_closed_form_lowers_the_first_error():
    model, batches, found = cases.vit_parts()
    many = [*batches, *torch.randn(16, *batches[0].shape, generator=torch.Generator().manual_seed(0))]
    without, fitted = (
        segue.plan_replacement(
            model, many, found["candidates"], sites=found["sites"], **QUICK | {"fit_steps": 1}, closed_form=closed
        ).errors
        for closed in (False, True)
    )
    linear = [option for option in without if option[1] == "LinearAttention"]
    assert all(fitted[option] < without[option] for option in linear)


@pytest.mark.parametrize(
    "budget",
    [Quality(kl=0.5), Quality(differing=0.5, saves="parameters"), Saving(parameters=0.2), Frontier(saves="parameters")],
)
def test_every_budget_is_kept(budget):
    chosen = planned(budget=budget).choice
    if isinstance(budget, Quality):
        assert chosen.kl <= (budget.kl or 9.0)
        assert chosen.differing <= (budget.differing or 1.0)
        assert chosen.saved[budget.saves or "flops"] > 0
    if isinstance(budget, Saving):
        assert chosen.saved["parameters"] >= 0.2


def test_the_frontier_rises(found):
    saved = [point.saved["flops"] for point in found.frontier]
    damages = [point.kl for point in found.frontier]
    assert saved == sorted(saved)
    assert damages == sorted(damages)
    assert len(found.plan_of(found.frontier[-1].subset).sites) == len(found.frontier[-1].subset)


def test_a_causal_model_counts_its_cache_and_its_decoding():
    model = models.build(lambda: models.llama(max_position_embeddings=64))
    batches = [{"input_ids": torch.randint(50, (2, 60), generator=torch.Generator().manual_seed(0))}]
    settings = {"sites": "model.layers.*.self_attn", "subsets": 8, "fit_steps": 2, "progress": None}
    with pytest.raises(DataError, match="recall needs a language model with a vocabulary"):
        segue.plan_replacement(model, batches, LinearAttention(), Saving(cache_bytes=0.4), recall=1.0, **settings)
    found = segue.plan_replacement(model, batches, LinearAttention(), Saving(cache_bytes=0.4), **settings)
    assert found.choice.saved["cache_bytes"] >= 0.4
    assert "| KL added | cache |" in str(found)  # not what it does not save
    assert found.costs.total["cache_bytes"] == 2 * 2 * 2 * 60 * 2 * 8 * 4  # layers, keys and values, rows, tokens, heads, width
    assert found.costs.total["decode"] > 0


def test_recall_counts_beside_the_text():
    model = small_models.model("llama")
    batches = [{"input_ids": torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(0))}]
    settings = {"sites": "model.layers.*.self_attn", "subsets": 8, "fit_steps": 1, "progress": None}
    budget = Saving(cache_bytes=0.4)
    plain, both, more = (
        segue.plan_replacement(model, batches, SlidingWindow(window=2), budget, recall=weight, **settings).matrix
        for weight in (0.0, 1.0, 3.0)
    )
    torch.testing.assert_close(more - plain, 3 * (both - plain), rtol=1e-3, atol=1e-6)
    assert (both - plain).diagonal().min() > 0


def test_images_are_also_measured_augmented():
    plain, both = planned(), planned(augmented=1.0)
    assert both.matrix.diagonal().sum() > 1.3 * plain.matrix.diagonal().sum()


def test_an_operator_without_a_derivative_is_measured_by_swaps_and_it_says_so():
    model, batches, settings = cases.rows()
    model[3] = Opaque()
    found = segue.plan_replacement(model, batches, {"low": NarrowLinear()}, Quality(kl=9.0), sites=settings["sites"], **QUICK)
    assert "by single and pair swaps" in found.notes[0]
    assert "jvp" in found.notes[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NarrowLinear:
    def __call__(self, teacher, site):
        return nn.Sequential(nn.Linear(teacher.in_features, 1), nn.Linear(1, teacher.out_features))


class Stopped(BaseException):
    pass


@pytest.mark.parametrize("place", ["costs", "fit", "curvature", "subsets"])
def test_an_interrupted_plan_resumes_to_the_same_result(place, tmp_path, monkeypatch, capsys):
    calls = {"costs": (planner, "fit_candidates"), "fit": (damage, "curvature"), "curvature": (damage, "divergences")}
    expected = planned(budget=Saving(parameters=0.2), folder=tmp_path / "whole")
    with monkeypatch.context() as patch:
        module, name = calls.get(place, (damage, "divergences"))
        original, count = getattr(module, name), [0]

        def stops(*args, **kwargs):
            count[0] += 1
            if place != "subsets" or count[0] == 2:
                raise Stopped
            return original(*args, **kwargs)

        patch.setattr(module, name, stops)
        with pytest.raises(Stopped):
            planned(budget=Saving(parameters=0.2), folder=tmp_path / "cut")
    assert "resumed" not in capsys.readouterr().err
    again = planned(budget=Saving(parameters=0.2), folder=tmp_path / "cut", progress="planning")
    assert "planning, resumed: 100%" in capsys.readouterr().err
    assert again.plan == expected.plan
    assert again.errors == expected.errors
    assert torch.equal(again.matrix, expected.matrix)
    assert again.choice.kl == expected.choice.kl


def test_a_fit_that_is_cut_short_continues_where_it_was(tmp_path, monkeypatch):
    from segue.planning import fitting

    expected = planned(cases.vit_parts, fit_steps=4, folder=tmp_path / "whole").errors
    steps = []
    original = fitting._record

    def stops(candidates, batch):
        steps.append(1)
        if len(steps) == 3:
            raise Stopped
        return original(candidates, batch)

    with monkeypatch.context() as patch:
        patch.setattr(fitting, "_record", stops)
        with pytest.raises(Stopped):
            planned(cases.vit_parts, fit_steps=4, folder=tmp_path / "cut")
    seen = []
    monkeypatch.setattr(fitting, "_record", lambda c, b: seen.append(1) or original(c, b))
    assert planned(cases.vit_parts, fit_steps=4, folder=tmp_path / "cut").errors == expected
    assert len(seen) == 2 + 1  # whose operations are counted


def test_damage_is_measured_on_other_batches_than_the_fit(monkeypatch):
    from segue.planning import fitting

    model, batches, settings = cases.vit_parts()
    seen = []
    original = fitting._record
    monkeypatch.setattr(fitting, "_record", lambda candidates, batch: seen.append(batch) or original(candidates, batch))
    wanted = {"sites": settings["sites"], **QUICK}
    one = segue.plan_replacement(model, batches, settings["candidates"], measure_on=1, **wanted)
    assert all(batch is batches[1] for batch in seen)
    assert len(seen) == 2 + 1  # whose operations are counted
    both = segue.plan_replacement(model, batches, settings["candidates"], **wanted)
    assert any(batch is batches[0] for batch in seen)  # nothing is left for the fit alone
    assert one.spent["inputs"] < both.spent["inputs"]


@pytest.mark.filterwarnings("ignore:operations are counted without those of aten..mv")  # of the regression
@pytest.mark.parametrize(("case", "saves"), [(cases.vit_parts, "flops"), (cases.llama, "cache_bytes")])
def test_what_it_says_to_have_spent_is_what_it_spends(case, saves):
    kept = []
    counted = flops(lambda: kept.append(planned(case, Quality(kl=99.0, saves=saves), fit_steps=8)))
    assert kept[0].spent["flops"] == pytest.approx(counted, rel=0.2)  # single tokens and the regression are not counted


def test_a_folder_of_another_plan_is_refused(tmp_path):
    planned(folder=tmp_path)
    with pytest.raises(DataError, match="holds another plan"):
        planned(folder=tmp_path, seed=1)


def test_a_damaged_journal_is_refused_and_a_cut_line_is_measured_again(tmp_path):
    first = planned(folder=tmp_path)
    path = tmp_path / "measured.jsonl"
    path.write_text(path.read_text()[:-20])
    assert torch.equal(planned(folder=tmp_path).matrix, first.matrix)
    for damaged in ("{\n" + path.read_text(), "[1]\n", '{"key": 1}\n{"name": 1}\n', '{"key": 1}\n3\n'):
        path.write_text(damaged)
        with pytest.raises(DataError, match="the measurements in .* cannot be read"):
            planned(folder=tmp_path)


NONE_FITS = "the candidate {!r} fits none of the 1 sites."
NONE_GIVEN = "the candidates must be at least one student, none of them called 'keep'."


@pytest.mark.parametrize(
    ("candidates", "error", "text"),
    [
        (LinearAttention(), StudentError, NONE_FITS.format("LinearAttention")),
        (NarrowMlp(ratio=0.5), StudentError, NONE_FITS.format("NarrowMlp(ratio=0.5)")),
        (lambda teacher, site: nn.Linear(6, 3), StudentError, NONE_FITS.format("<lambda>")),
        ([], PlanError, NONE_GIVEN),
        ({"keep": Drop()}, PlanError, NONE_GIVEN),
        ([Drop(), Drop()], PlanError, "2 candidates have 1 names."),
    ],
)
def test_bad_candidates_are_refused_in_three_lines(candidates, error, text):
    model = models.build(models.mlp)
    before = [id(m) for m in model.modules()]
    with pytest.raises(error) as raised:
        segue.plan_replacement(model, [torch.randn(8, 6)], candidates, sites="0", **QUICK)
    assert str(raised.value).splitlines()[0] == text
    assert len(str(raised.value).splitlines()) == 3
    assert [id(m) for m in model.modules()] == before


@pytest.mark.parametrize(
    ("model", "text"), [(Noisy(), "the same logits for the same batch"), (Unnamed(), "must return logits")]
)
def test_models_that_cannot_be_measured_are_refused_and_stay_as_they_are(model, text):
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(PlanError, match=text):
        segue.plan_replacement(model, [torch.randn(8, 6)], segue.students.Reinit(), sites="layers.*", **QUICK)
    assert same_state(model.state_dict(), before)
    assert not any(segue.sites.is_seam(module) for module in model.modules())


def stopped(*_args, **_settings):
    raise AssertionError("the work of minutes has begun")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"budget": Saving(parameters=0.99)}, "no choice of these candidates saves parameters 99.0%."),
        ({"budget": Saving(cache_bytes=0.1)}, "cache_bytes cannot be saved in this model."),
        ({"settings": {"sched": 1}}, "settings={'sched': ...} is no further setting of a plan."),
        ({"settings": {"sites": "*"}}, "settings={'sites': ...} is no further setting of a plan."),
        ({"settings": {"train": "none"}}, "Plan(train=...) must be 'students' or 'all', got 'none'."),
        ({"cost_batch": torch.ones(2, 2)}, "the model cannot be called with the cost_batch."),
        ({"batches": [torch.full((4, 3, 32, 32), torch.nan)]}, "the model must return finite logits."),
        (
            {"batches": [torch.ones(4, 3, 32, 32), torch.full((4, 3, 32, 32), torch.nan)]},
            "the model must return finite logits.",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_before_the_fit(settings, text, monkeypatch):
    monkeypatch.setattr(planner, "fit_candidates", stopped)
    model, batches, found = cases.vit()
    before = [id(m) for m in model.modules()]
    with pytest.raises(PlanError) as raised:
        segue.plan_replacement(model, **{"batches": batches, **found, **QUICK, **settings})
    assert str(raised.value).splitlines()[0] == text
    assert len(str(raised.value).splitlines()) == 3
    assert [id(m) for m in model.modules()] == before


def test_students_that_a_fit_has_broken_are_refused():
    model, batches, _ = cases.vit()
    broken = [*batches, torch.full((4, 3, 32, 32), torch.nan)]
    with pytest.raises(PlanError, match=r"Some are inf or NaN with NarrowMlp\(ratio=0.5\) at blocks\.\d\.mlp"):
        segue.plan_replacement(model, broken, NarrowMlp(ratio=0.5), Saving(parameters=0.1), sites="blocks.*.mlp", **QUICK)


def test_damage_is_measured_on_enough_predictions(monkeypatch):
    """A classifier's batch has few predictions: the default takes more batches, and half of them where they are too few."""
    monkeypatch.setattr(planner, "ENOUGH", 24)
    model, (first, _), found = cases.vit_parts()
    seen = []
    original = damage.divergences
    monkeypatch.setattr(damage, "divergences", lambda c, b, m, s: seen.append((b, s)) or original(c, b, m, s))

    def measured(count):
        seen.clear()
        batches = [first + i for i in range(count)]
        notes = segue.plan_replacement(model, batches, budget=Saving(parameters=0.2), **found, **QUICK).notes
        assert [any(batch is one for one, _ in seen) for batch in batches] == [i < len(seen) for i in range(count)]
        return len(seen), notes

    assert measured(8) == (6, ())  # two are left for the fit
    short, notes = measured(6)
    assert short == 3
    assert "Damage is measured on 12 predictions" in notes[0]


def test_every_option_is_measured_on_all_batches_and_every_subset_on_two(monkeypatch):
    model, (first, _), found = cases.vit_parts()
    seen = []
    original = damage.divergences
    monkeypatch.setattr(damage, "divergences", lambda c, b, m, s: seen.extend(s) or original(c, b, m, s))
    given = segue.plan_replacement(model, [first + i for i in range(6)], **found, **QUICK, measure_on=5)
    times = {subset: seen.count(subset) for subset in map(tuple, seen)}
    assert {times[option,] for option in given.prediction.options} == {5}
    assert {count for subset, count in times.items() if len(subset) > 1} == {2}
    assert sum(len(subset) > 1 for subset in times) == 16


def test_no_more_batches_are_read_than_are_used():
    model, (first, second), found = cases.vit_parts()
    segue.plan_replacement(model, itertools.cycle([first, second]), **found, **QUICK)


def test_few_sites_have_predictions_without_an_interval():
    model, batches, _ = cases.vit()
    few = segue.plan_replacement(
        model, batches, Drop(returns="zeros"), Quality(kl=99.0, saves="parameters"), sites="blocks.*.attn", **QUICK
    )
    assert few.differing.measured == 4  # three pairs and all three
    assert few.prediction.r2 is None
    assert 0 < few.choice.differing <= 1
    assert "too few for an interval" in str(few)
    assert " in nine cases of ten), and" not in str(few)


def test_phases_of_ones_own_take_the_place_of_the_pace():
    own = segue.methods.local_fit(sites="*").phases
    found = planned(budget=Saving(flops=0.3), settings={"phases": own})
    assert found.plan.phases == own


def test_a_plan_that_cannot_be_written_says_so(found, tmp_path):
    (tmp_path / "file").touch()
    for write in (found.save, found.draw):
        with pytest.raises(CheckpointError, match="file cannot be written"):
            write(tmp_path / "file")


def test_no_batches_are_refused():
    model, _, settings = cases.vit()
    with pytest.raises(DataError, match="there are no batches"):
        segue.plan_replacement(model, [], settings["candidates"], sites=settings["sites"], **QUICK)


def test_a_plan_without_a_budget_saves_what_can_be_saved_and_says_so():
    found = planned(cases.llama)
    assert found.metric == "cache_bytes"
    assert found.choice.saved["cache_bytes"] > 0 >= found.choice.saved["flops"]
    text = " ".join(found.notes)
    assert "the plan is the least damage for 50% of what can be saved of cache_bytes" in text
    assert "No candidate saves flops on inputs of " in text


def test_another_recipe_leaves_turns_and_ramps_beside_it(found, tmp_path):
    other = segue.methods.transfer(sites=found.plan.sites, student=found.plan.student)
    changed = dataclasses.replace(found, plan=other)
    changed.save(tmp_path)
    assert segue.Plan.from_dict(json.loads((tmp_path / "plan.json").read_text())) == other
    assert segue.Plan.from_dict(json.loads((tmp_path / "staggered.json").read_text())) == found.plan
    assert "Turns and ramps are those of staggered.json." in str(changed)
    assert changed.adaptive_plan() == found.adaptive_plan()
    found.save(tmp_path)
    assert not (tmp_path / "staggered.json").exists()


def test_the_adaptive_schedule_takes_its_budget_from_the_plan(found):
    loose, tight = found.adaptive_plan(kl=1.0), found.adaptive_plan(kl=0.01)
    for site in found.plan.sites:
        wide, narrow = (plan.schedule.schedules[site] for plan in (loose, tight))
        assert narrow.budget < wide.budget <= found.errors[site, dict(found.choice.subset)[site]] + 1e-12
        assert narrow.divergence == 0.01
    model, batches, _ = cases.vit_parts()
    segue.replace_(model, tight, total_steps=10, example=batches[0])
