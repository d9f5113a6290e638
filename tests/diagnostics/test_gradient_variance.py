"""Propositions 1 and 2 and the remark on soft gates, against models put together by hand and sums over whole populations."""

import math
import statistics

import numpy as np
import pytest
import torch
from torch import nn

from segue.diagnostics import gate_gradient_variance
from segue.diagnostics.gradient_variance import Slope, Variance
from segue.errors import DataError, HandoverError, PlanError, SiteError
from segue.gates import Bernoulli, Blend, GumbelSoftmax
from segue.schedules import Constant, Linear, PerSite, Staggered
from tests.diagnostics import reference
from tests.diagnostics.reference import Silent, ThreeWeights, parts, square, variance
from tests.helpers import models

ROUNDING = 1e-12  # relative, of sums in float64
MODELS = {"small ViT": reference.vit, "timm test_vit": reference.timm_vit, "BERT": reference.bert}
SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)


def measured(of, alpha=0.5, **settings):
    return gate_gradient_variance(of.handover, of.batches, of.loss, alpha, **settings)


def coin(p):
    return [(weight, chance) for weight, chance in ((0.0, 1.0 - p), (1.0, p)) if chance > 0]


def others_at_mean(of, mean, site, outcomes):
    return {**{name: [(mean, 1.0)] for name in of.sites}, site: outcomes}


def exactly(value):
    return pytest.approx(value, rel=ROUNDING, abs=1e-300)


@pytest.mark.parametrize("teacher_gradient", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_proposition_1_holds_over_a_population_of_minibatches_and_both_values_of_the_coin(name, teacher_gradient):
    of = MODELS[name](gate=Bernoulli(), teacher_gradient=teacher_gradient)
    p = 0.3
    found = measured(of, 1 - p, most_outcomes=2)
    for site in of.sites:
        a = of.slopes(site, 1.0, dict.fromkeys(of.sites, p))
        data, mean = variance(a), float((a.mean(0) ** 2).sum())
        by_formula = p * data + p * (1 - p) * mean
        _, _, by_population = parts(of, others_at_mean(of, p, site, coin(p)), site)
        assert by_population == exactly(by_formula)
        assert found.alone.sites[site].total == exactly(by_population)
        slope = found.slopes[site]
        assert (slope.variance, slope.mean_square, slope.square) == (exactly(data), exactly(mean), exactly(square(a)))
        assert slope.coin(p) == exactly(by_formula)
        assert slope.coin_bound(p) == exactly(p * data + p * (1 - p) * square(a))
        assert slope.coin(p) < slope.coin_bound(p)


@pytest.mark.parametrize("name", MODELS)
def test_proposition_2_gives_the_gates_part_of_a_coin_and_nothing_for_a_blend(name):
    p = 0.7
    coins, blend = MODELS[name](gate=Bernoulli()), MODELS[name](gate=Blend())
    tossed, blended = measured(coins, 1 - p, most_outcomes=2), measured(blend, 1 - p)
    for site in coins.sites:
        a = coins.slopes(site, 1.0, dict.fromkeys(coins.sites, p))
        assert tossed.alone.sites[site].gate == exactly(p * (1 - p) * square(a))
        assert tossed.alone.sites[site].data == exactly(p**2 * variance(a))
        assert blended.alone.sites[site].gate == blended.together.sites[site].gate == 0.0
        assert blended.alone.sites[site].standard_error == 0.0
        difference = tossed.alone.sites[site].gate - blended.alone.sites[site].gate
        assert difference == exactly(p * (1 - p) * square(a))
    assert (tossed.alone.how, blended.alone.how, blended.together.how) == ("exact", "exact", "exact")


@pytest.mark.parametrize("p", SHARES)
def test_the_gates_part_of_a_coin_at_every_probability(p):
    of = reference.vit(gate=Bernoulli())
    found = measured(of, 1 - p)
    for site in of.sites:
        alone = found.alone.sites[site]
        a = of.slopes(site, 1.0, dict.fromkeys(of.sites, p))
        assert alone.gate == exactly(p * (1 - p) * square(a))
        assert alone.predicted == exactly(p * (1 - p) * square(a))
        assert alone.data == exactly(p**2 * variance(a))
        assert alone.standard_error == 0.0
        if p in (0.0, 1.0):
            assert alone.gate == alone.predicted == found.together.sites[site].gate == 0.0


@pytest.mark.parametrize("p", SHARES)
def test_the_gates_part_of_a_blend_is_nothing_at_every_share(p):
    of = reference.vit(gate=Blend())
    found = measured(of, 1 - p)
    for setting in (found.alone, found.together):
        for site in of.sites:
            one = setting.sites[site]
            assert one.gate == one.predicted == one.standard_error == 0.0
            gradients = [of.gradients(dict.fromkeys(of.sites, p), index)[site] for index in range(3)]
            assert one.data == exactly(variance(gradients))
        assert setting.total.gate == 0.0


def test_the_slope_of_a_blend_is_the_gradient_per_unit_of_its_weight():
    of = reference.vit(gate=Blend())
    found = measured(of, 0.75)
    a = of.slopes(of.sites[0], 0.25, dict.fromkeys(of.sites, 0.25))
    assert found.slopes[of.sites[0]].square == exactly(square(a))
    assert found.slopes[of.sites[0]].variance == exactly(variance(a))


def test_the_formulas_of_a_slope_are_those_of_the_paper():
    slope = Slope(variance=3.0, mean_square=5.0, square=8.0)
    assert slope.coin(0.25) == 0.25 * 3 + 0.25 * 0.75 * 5
    assert slope.coin_bound(0.25) == 0.25 * 3 + 0.25 * 0.75 * 8
    assert slope.soft(0.25, 0.125) == 0.0625 * 3 + 0.125 * 8
    assert slope.soft(0.25, 0.25 * 0.75) == slope.coin(0.25)  # a coin is a soft gate too


def linear_loss(y, direction):
    """A loss that is linear in what the site returns, so that a does not depend on the weight."""
    return (y * direction).sum()


def test_the_remark_is_exact_for_a_soft_gate_with_three_weights_on_a_linear_tail():
    of = reference.narrow(linear_loss, batches=4, gate=ThreeWeights())
    p = 0.4
    found = measured(of, 1 - p)
    site = found.alone.sites["site"]
    outcomes = ThreeWeights().outcomes(1 - p)
    assert math.fsum(w * c for w, c in outcomes) == exactly(p)
    r_variance = sum(c * (w - p) ** 2 for w, c in outcomes)
    a = of.slopes("site", 1.0, {})
    assert site.total == exactly(p**2 * variance(a) + r_variance * square(a))
    assert site.gate == exactly(r_variance * square(a)) == site.predicted
    assert site.data == exactly(p**2 * variance(a))
    assert found.slopes["site"].soft(p, r_variance) == exactly(site.total)
    assert (found.alone.how, site.standard_error) == ("exact", 0.0)


def soft_coin(u, p, temperature=1.0):
    """The student's entry of a Gumbel-softmax, by its definition."""
    x = (np.log(p) - np.log1p(-p) + np.log(u) - np.log1p(-u)) / temperature
    return 1 / (1 + np.exp(-x))


def fine(count=400_000):
    return (np.arange(count) + 0.5) / count


@pytest.mark.parametrize(("p", "temperature"), [(0.1, 1.0), (0.5, 1.0), (0.9, 0.5), (0.3, 2.0)])
def test_the_remark_is_exact_for_a_gumbel_softmax_on_a_linear_tail(p, temperature):
    of = reference.narrow(linear_loss, batches=4, gate=GumbelSoftmax(temperature=temperature))
    found = measured(of, 1 - p)
    r = soft_coin(fine(), p, temperature)
    a = of.slopes("site", 1.0, {})
    site = found.alone.sites["site"]
    assert site.gate == pytest.approx(r.var() * square(a), rel=2e-6)
    assert site.predicted == pytest.approx(r.var() * square(a), rel=2e-6)
    assert site.total == pytest.approx(r.mean() ** 2 * variance(a) + r.var() * square(a), rel=2e-6)
    assert found.alone.how == "quadrature"
    assert abs(site.gate / (r.var() * square(a)) - 1) * site.gate <= site.standard_error + 1e-6 * site.gate


def test_on_a_real_tail_the_measured_value_is_the_integral_and_not_the_formula():
    of = reference.vit(depth=1, width=4, batches=2, gate=GumbelSoftmax())
    p, (name,) = 0.3, of.sites
    site = measured(of, 1 - p).alone.sites[name]
    weights = soft_coin(fine(120), p)
    outcomes = {name: [(float(weight), 1 / len(weights)) for weight in weights]}
    gate, data, _ = parts(of, outcomes, name)
    assert abs(site.gate - gate) < site.standard_error
    assert site.gate == pytest.approx(gate, rel=0.01)
    assert site.data == pytest.approx(data, rel=0.01)
    assert abs(site.gate - site.predicted) > 0.1 * site.gate
    assert 0 < site.standard_error < 0.1 * site.gate


def test_the_error_of_a_quadrature_is_its_distance_from_a_coarser_one():
    of = reference.vit(depth=1, batches=1, gate=GumbelSoftmax())
    (name,) = of.sites
    site = measured(of, 0.7).alone.sites[name]
    nodes = GumbelSoftmax().nodes(0.7)
    found = [of.gradients({name: weight}, 0)[name] for weight, _ in nodes]
    chances = [chance for _, chance in nodes]
    half = [chance / sum(chances[::2]) for chance in chances[::2]]
    assert site.gate == exactly(variance(found, chances))
    assert site.standard_error == pytest.approx(abs(variance(found, chances) - variance(found[::2], half)), rel=1e-6)


@pytest.mark.parametrize("alpha", [0.3, 0.5])
@pytest.mark.parametrize("depth", [3, 4])
def test_all_coins_together_are_a_loop_over_all_that_they_can_do(depth, alpha):
    of = reference.vit(depth=depth, width=4, batches=2, gate=Bernoulli(), teacher_gradient=depth == 3)
    found = measured(of, alpha)
    outcomes = {name: coin(1 - alpha) for name in of.sites}
    every = list(reference.combinations(outcomes))
    assert len(every) == 2**depth
    gradients = [[of.gradients(weights, index) for weights, _ in every] for index in range(2)]
    chances = [chance for _, chance in every]
    for site in of.sites:
        rows = [[one[site] for one in row] for row in gradients]
        gate = sum(variance(row, chances) for row in rows) / 2
        data = variance([sum(c * g for c, g in zip(chances, row, strict=True)) for row in rows])
        assert found.together.sites[site].gate == exactly(gate)
        assert found.together.sites[site].data == pytest.approx(data, rel=1e-10)
        assert abs(found.together.sites[site].gate / found.alone.sites[site].gate - 1) > 1e-3  # another question
    assert found.together.how == "exact"


def test_three_weights_at_two_sites_together_are_a_loop_over_all_nine():
    of = reference.vit(gate=ThreeWeights())
    found = measured(of, 0.5)
    for site in of.sites:
        gate, data, _ = parts(of, {name: ThreeWeights().outcomes(0.5) for name in of.sites}, site)
        assert found.together.sites[site].gate == exactly(gate)
        assert found.together.sites[site].data == exactly(data)


def test_the_total_is_that_of_all_students_gradients_as_one_vector():
    of = reference.vit(gate=Bernoulli())
    found = measured(of, 0.4).together
    outcomes = {name: coin(0.6) for name in of.sites}
    gate = 0.0
    for index in range(3):
        every = [(of.gradients(weights, index), chance) for weights, chance in reference.combinations(outcomes)]
        joined = [np.concatenate([one[site] for site in of.sites]) for one, _ in every]
        gate += variance(joined, [chance for _, chance in every]) / 3
    assert found.total.gate == exactly(gate)
    assert found.total.data == exactly(sum(site.data for site in found.sites.values()))
    assert found.total.predicted == exactly(sum(site.predicted for site in found.sites.values()))
    assert found.total.total == found.total.gate + found.total.data


SEEDS, DRAWS, ALPHA = 30, 16, 0.8


@pytest.fixture(scope="module")
def drawn():
    """Coins drawn with many seeds, beside the enumeration of all that they can do."""
    generator = torch.Generator().manual_seed(0)
    same = torch.randn(4, 6, generator=generator)
    batches = [((same + 0.3 * torch.randn(4, 6, generator=generator)).double(), torch.arange(4)) for _ in range(2)]
    of = reference.begin(models.build(models.mlp).double(), batches, sites="{0,2}", gate=Bernoulli(), teacher_gradient=True)
    exact = measured(of, ALPHA, alone=False).together
    found = [measured(of, ALPHA, alone=False, most_outcomes=1, draws=DRAWS, seed=seed).together for seed in range(SEEDS)]
    assert {one.how for one in found} == {f"{DRAWS} draws"}
    return of, exact, found


def test_draws_agree_with_the_enumeration_within_four_standard_errors(drawn):
    of, exact, found = drawn
    many = measured(of, ALPHA, alone=False, most_outcomes=1, draws=64).together
    for site in of.sites:
        assert abs(many.sites[site].gate - exact.sites[site].gate) < 4 * many.sites[site].standard_error
        mean = statistics.mean(one.sites[site].gate for one in found)
        spread = statistics.stdev(one.sites[site].gate for one in found)
        assert abs(mean - exact.sites[site].gate) < 3 * spread / math.sqrt(SEEDS)


def test_the_standard_error_of_draws_is_their_spread_over_seeds(drawn):
    of, _, found = drawn
    for site in of.sites:
        spread = statistics.stdev(one.sites[site].gate for one in found)
        stated = math.sqrt(statistics.mean(one.sites[site].standard_error ** 2 for one in found))
        assert 0.5 < stated / spread < 2
    spread = statistics.stdev(one.total.gate for one in found)
    assert 0.5 < math.sqrt(statistics.mean(one.total.standard_error**2 for one in found)) / spread < 2
    stated = found[0].total.standard_error
    assert stated <= sum(site.standard_error for site in found[0].sites.values()) * (1 + 1e-9)


def test_the_data_part_of_draws_is_unbiased(drawn):
    of, exact, found = drawn
    for site in of.sites:
        values = [one.sites[site].data for one in found]
        error = statistics.stdev(values) / math.sqrt(SEEDS)
        assert abs(statistics.mean(values) - exact.sites[site].data) < 3 * error
        uncorrected = exact.sites[site].data + (1 - 1 / 2) * exact.sites[site].gate / DRAWS
        assert abs(statistics.mean(values) - uncorrected) > 3 * error  # so the correction is seen to be there


def test_draws_are_seeded(drawn):
    of, _, found = drawn
    again = measured(of, ALPHA, alone=False, most_outcomes=1, draws=DRAWS, seed=3).together
    assert again == found[3]
    assert found[3] != found[4]


class Overheard(Silent):
    """A gate that remembers what it drew."""

    def __init__(self):
        self.said = []

    def __call__(self, alpha, noise):
        self.said.append(super().__call__(alpha, noise))
        return self.said[-1]


def test_draws_are_summed_up_as_one_does_by_hand():
    of = reference.narrow(lambda y, target: (y - target).pow(4).sum(), batches=3, gate=(gate := Overheard()))
    site = measured(of, 0.6, draws=16).alone.sites["site"]
    weights = np.array(gate.said[-3 * 16 :]).reshape(3, 16)
    assert len(np.unique(weights)) == 48  # each minibatch has draws of its own
    found = [np.stack([of.gradients({"site": float(w)}, i)["site"] for w in row]) for i, row in enumerate(weights)]
    samples = [row.var(axis=0, ddof=1).sum() for row in found]
    blocks = [[row[block::8].var(axis=0, ddof=1).sum() for block in range(8)] for row in found]
    errors = [np.std(row, ddof=1) / math.sqrt(8) for row in blocks]
    assert site.gate == exactly(np.mean(samples))
    assert site.standard_error == pytest.approx(math.sqrt(sum(error**2 for error in errors)) / 3, rel=1e-10)
    over_data = variance([row.mean(axis=0) for row in found])
    assert site.data == pytest.approx(over_data - (2 / 3) * np.mean(samples) / 16, rel=1e-10)


def test_another_gate_can_be_asked_about_with_the_same_weights():
    blend, coins = reference.vit(gate=Blend()), reference.vit(gate=Bernoulli())
    assert measured(blend, 0.4, gate=Bernoulli()).together == measured(coins, 0.4).together
    assert measured(coins, 0.4, gate=Blend()).together == measured(blend, 0.4).together
    assert coins.handover.plan.gate == Bernoulli()


def test_draws_are_cut_into_blocks_of_one_size():
    of = reference.vit(depth=1, batches=1, gate=Bernoulli())
    ways = [measured(of, most_outcomes=1, draws=draws).together.how for draws in (4, 5, 8, 17, 18, 64)]
    assert ways == ["4 draws", "4 draws", "8 draws", "16 draws", "16 draws", "64 draws"]


def test_the_draws_of_a_soft_gate_agree_with_its_quadrature():
    of = reference.vit(depth=1, batches=2, gate=GumbelSoftmax())
    (name,) = of.sites
    exact = measured(of, 0.6).alone.sites[name]
    found = measured(of, 0.6, most_outcomes=1, draws=64).alone
    assert found.how == "64 draws"
    assert abs(found.sites[name].gate - exact.gate) < 4 * found.sites[name].standard_error


@pytest.mark.parametrize("gate", [Bernoulli(), GumbelSoftmax(), Blend(), Silent()])
def test_with_one_site_alone_and_together_are_one(gate):
    of = reference.vit(depth=1, batches=2, gate=gate)
    found = measured(of, 0.6, draws=8)
    assert found.alone == found.together
    without = measured(of, 0.6, draws=8, alone=False)
    assert without.together == found.together


def test_a_gate_that_does_not_say_its_law_is_drawn():
    of = reference.vit(depth=1, batches=2, gate=Silent())
    (name,) = of.sites
    found = measured(of, 0.5, draws=64)
    assert found.alone.how == found.together.how == "64 draws"
    assert found.distributions[name].drawn
    assert found.distributions[name].variance == pytest.approx(1 / 12, rel=0.02)  # uniform on [0, 1]
    site = found.alone.sites[name]
    outcomes = {name: [(float(weight), 1 / 100) for weight in fine(100)]}
    gate, _, _ = parts(of, outcomes, name)
    assert abs(site.gate - gate) < 4 * site.standard_error


def test_patterns_choose_sites_while_all_gates_move():
    of = reference.vit(depth=3, width=4, batches=2, gate=Bernoulli())
    whole = measured(of, 0.4)
    for chosen in ("blocks.1.attn", ["blocks.{0,2}.attn"], ("blocks.2.*", "blocks.0.attn")):
        found = measured(of, 0.4, sites=chosen)
        assert len(found.alone.sites) == (1 if chosen == "blocks.1.attn" else 2)
        for name, site in found.alone.sites.items():
            assert site == whole.alone.sites[name]
            assert found.together.sites[name] == whole.together.sites[name]
            assert found.slopes[name] == whole.slopes[name]
        assert list(found.distributions) == list(found.slopes) == list(found.alone.sites)


def test_the_way_that_is_named_is_that_of_the_select_sites():
    schedule = PerSite(schedules={"blocks.0.attn": Constant(alpha=1.0)}, otherwise=Constant(alpha=0.5))
    of = reference.vit(width=4, batches=1, gate=GumbelSoftmax(), schedule=schedule)
    assert measured(of, None, sites="blocks.0.attn", draws=4).alone.how == "exact"
    assert measured(of, None, sites="blocks.1.attn", draws=4).alone.how == "quadrature"
    assert measured(of, None, draws=4).alone.how == "exact, quadrature"


def test_without_alpha_the_shares_are_those_of_the_running_handover_site_by_site():
    schedule = Staggered(then=Linear(start=0.9, end=0.1), overlap=0.5)
    of = reference.vit(depth=2, gate=Bernoulli(), schedule=schedule)
    of.handover.resume_at(9)
    p = {name: 1 - alpha for name, alpha in of.handover.alphas.items()}
    assert len(set(p.values())) == 2
    found = measured(of, None)
    for site in of.sites:
        assert found.distributions[site].alpha == of.handover.alphas[site]
        gate, data, _ = parts(of, {name: coin(p[name]) for name in of.sites}, site)
        assert found.together.sites[site].gate == exactly(gate)
        assert found.together.sites[site].data == exactly(data)
        a = of.slopes(site, 1.0, p)
        assert found.alone.sites[site].gate == exactly(p[site] * (1 - p[site]) * square(a))
        assert found.alone.sites[site].predicted == exactly(p[site] * (1 - p[site]) * square(a))
        assert found.together.sites[site].predicted == exactly(p[site] * (1 - p[site]) * square(a))


def test_without_alone_nothing_is_measured_where_there_is_no_chance():
    blend, coins = reference.vit(gate=Blend()), reference.vit(gate=Bernoulli())
    quick = measured(blend, 0.5, alone=False)
    assert quick.alone is None
    assert all(slope.square == 0.0 for slope in quick.slopes.values())
    assert quick.together == measured(blend, 0.5).together
    assert measured(coins, 0.5, alone=False).slopes == measured(coins, 0.5).slopes


def test_a_site_that_is_called_three_times_in_a_forward_has_one_gradient():
    original = models.build(models.SharedLayers).double()
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 6, generator=generator).double(), torch.arange(4)) for _ in range(2)]
    of = reference.begin(original, batches, sites="layers.*", gate=Bernoulli())
    (name,) = of.sites
    found = measured(of, 0.5).alone.sites[name]
    teachers = of.original.layers

    def gradient(index, weight):
        model, students = of.model({name: weight})
        for place in range(len(teachers)):
            model.layers[place] = model.get_submodule(name)
        loss = of.loss(model, batches[index])
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(students[name].parameters()))]).numpy()

    a = np.stack([gradient(index, 1.0) for index in range(2)])
    assert found.gate == exactly(0.25 * square(a))


def test_a_student_with_nothing_to_train_has_no_variance():
    of = reference.narrow(linear_loss, gate=Bernoulli(), student=lambda teacher, site: nn.Softmax(-1), sites="before")
    of.original.site = nn.Identity()
    of.handover.model.site = nn.Identity()
    of.batches = [(x, x.new_zeros(2, 2)) for x, _ in of.batches]
    of.handover.seams["before"].teacher = nn.Identity()
    assert measured(of).alone.sites["before"] == Variance(gate=0.0, data=0.0, predicted=0.0, standard_error=0.0)


def test_what_cannot_be_measured_is_refused():
    of = reference.vit(depth=1, width=4, batches=1, gate=Bernoulli())
    with pytest.raises(
        PlanError, match=r"draws=...\) must be an integer of at least 4, got 3\.\s+.*\s+Hint: leave it out for 64"
    ):
        measured(of, draws=3)
    with pytest.raises(SiteError, match=r"'block.0.attn' matches none of the 1 sites of the handover(.|\n)*blocks.0.attn"):
        measured(of, sites="block.0.attn")
    with pytest.raises(SiteError, match="'nothing' matches none"):
        measured(of, sites=["blocks.*.attn", "nothing"])
    of.batches = []
    with pytest.raises(DataError, match="`batches` is empty"):
        measured(of)
    for alpha in (-0.1, 1.1, math.nan):
        with pytest.raises(PlanError, match=r"alpha=...\) must be a number from 0 to 1"):
            measured(of, alpha)


def test_released_teachers_and_finished_handovers_are_refused():
    of = reference.vit(depth=1, width=4, batches=1, gate=Bernoulli(), schedule=Constant(alpha=0.0), release=True)
    of.loss(of.handover.model, of.batches[0])
    of.handover.step()
    assert of.handover.seams["blocks.0.attn"].teacher is None
    with pytest.raises(HandoverError, match=r"gate_gradient_variance\(\) needs the teachers(.|\n)*released at takeover"):
        measured(of)
    ended = reference.vit(depth=1, width=4, batches=1)
    ended.handover.cancel_()
    with pytest.raises(HandoverError, match="This one is cancelled"):
        measured(ended)


def test_batches_may_be_a_generator_that_can_be_read_once():
    of = reference.vit(depth=2, width=4, gate=Bernoulli())
    once = gate_gradient_variance(of.handover, iter(of.batches), of.loss)
    assert once.together == measured(of).together
    assert once.batches == 3


def test_it_prints_a_table_with_a_line_for_each_site_and_setting():
    found = measured(reference.vit(width=4, gate=Bernoulli()))
    lines = str(found).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {len(row) for row in rows} == {6}
    assert rows[0] == ["site", "gates that vary", "by the gates", "standard error", "the paper's formula", "over data"]
    assert [row[:2] for row in rows[2:]] == [
        [site, f"{setting} (exact)"] for setting in ("alone", "together") for site in ("blocks.0.attn", "blocks.1.attn", "all")
    ]
    for row, setting in zip(rows[4:], (found.alone.total,), strict=False):
        numbers = [float(cell) for cell in row[2:]]
        expected = [setting.gate, setting.standard_error, setting.predicted, setting.data]
        assert numbers == pytest.approx(expected, rel=5e-3)
    quick = measured(reference.vit(width=4, gate=Bernoulli()), alone=False)
    assert len(str(quick).splitlines()) == 2 + 3
