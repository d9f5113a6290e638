"""What a plan costs: Table 1 of the paper by hand, against models put together without a seam and real training steps."""

import copy
import json
import math
import warnings

import pytest
import timm
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import segue
from segue.diagnostics.costs import Cost, Phase, cost
from segue.diagnostics.counting import saved_bytes
from segue.errors import PlanError, SegueWarning
from segue.gates import Bernoulli, GumbelSoftmax
from segue.lab.small_vit import VisionTransformer
from segue.losses import FeatureGuidance, LogitDistillation
from segue.schedules import Adaptive, Constant, Linear
from segue.training.tasks import Classification
from tests.helpers import models
from tests.helpers.tiny import SITES, Net, same_state
from tests.training.fit_cases import CountedBatches

TOTAL = 20
METHODS = segue.methods
IMAGES = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
X = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def original():
    return models.build(lambda: VisionTransformer(depth=2, width=16, heads=2, patch=4))


def mean_square(model, batch):
    return model(batch).float().square().mean()


def by_hand(original, train="students"):
    """Put students in by plain assignment and freeze the rest."""
    model = copy.deepcopy(original).requires_grad_(train == "all").train()
    for block in model.blocks:
        block.attn = copy.deepcopy(block.attn).requires_grad_(True)
    return model


def counted(run):
    """Count with torch's own counter alone."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def step_of(model, more=lambda: 0.0):
    trained = [p for p in model.parameters() if p.requires_grad]
    return counted(lambda: torch.autograd.grad(mean_square(model, IMAGES) + more(), trained, allow_unused=True))


def kept_by(model):
    return saved_bytes(lambda: mean_square(model, IMAGES), [*model.parameters(), *model.buffers()])


def size(*modules):
    return sum(p.numel() for module in modules for p in module.parameters())


PHASES = {
    "dcr": [("blend", 4), ("after takeover", 16)],
    "dcr_dfg": [("blend", 4), ("after takeover", 16)],
    "theseus": [("blend", 4), ("after takeover", 16)],
    "theseus_gumbel": [("blend", 4), ("after takeover", 16)],
    "gumbel_dfg": [("blend", 4), ("after takeover", 16)],
    "student_only": [("after takeover", 20)],
    "distillation": [("after takeover", 20)],
    "fitnets": [("after takeover", 20)],
    "lolcats": [("hold", 10), ("after takeover", 10)],
    "halo": [("hold", 6), ("after takeover", 14)],
    "local_fit": [("hold", 10), ("after takeover", 10)],
    "transfer": [("hold", 15), ("after takeover", 5)],
}


def test_the_phases_of_every_method_are_known():
    assert set(PHASES) == set(METHODS.ALL)


@pytest.mark.parametrize("name", PHASES)
def test_every_method_has_its_phases_and_its_sums(name):
    found = cost(Net(depth=2), METHODS.ALL[name](sites=SITES), X, total_steps=TOTAL)
    assert [(phase.name, phase.steps) for phase in found.phases] == PHASES[name]
    assert found.steps == len(found.per_step) == TOTAL
    assert found.flops == sum(found.per_step) == pytest.approx(sum(phase.steps * phase.flops for phase in found.phases))
    assert found.to_student_only == pytest.approx(sum(found.per_step) / (TOTAL * found.student_only.flops))
    assert found.to_distillation == pytest.approx(sum(found.per_step) / (TOTAL * found.distillation.flops))
    assert found.student_only.flops < found.distillation.flops
    if name == "student_only":  # but for the first step, which compares the two sides
        first, *later = found.per_step
        assert first == found.student_only.flops + sum(found.teachers.values())
        assert set(later) == {found.student_only.flops}
    if name == "distillation":
        assert set(found.per_step[1:]) == {found.distillation.flops}


def test_an_adaptive_schedule_is_counted_on_its_slowest_course_and_says_so():
    course = Adaptive(until=0.4)
    plan = segue.Plan(sites=SITES, schedule=course, guidance=FeatureGuidance())
    fixed = segue.Plan(
        sites=SITES, schedule=lambda *at: course(*at), guidance=FeatureGuidance(schedule=lambda *at: course(*at))
    )
    found, expected = (cost(Net(depth=2), one, X, total_steps=TOTAL) for one in (plan, fixed))
    assert found.per_step == expected.per_step
    assert [(phase.name, phase.steps) for phase in found.phases] == [("blend", 8), ("after takeover", 12)]
    assert (found.adaptive, expected.adaptive) == (True, False)
    assert found.notes == [*expected.notes, "The schedule adapts: counted is its slowest course, so a run costs at most this."]
    assert Cost.from_dict(found.to_dict()).notes == found.notes


def test_where_nothing_is_added_no_number_of_modules_breaks_even():
    phase = Phase(name="after takeover", steps=2, flops=10.0, saved_bytes=0, parameters=1)
    found = Cost(phases=(phase,), student_only=phase, distillation=phase, teachers={"a": 2}, teacher_pass=6, per_step=(10, 10))
    assert (found.break_even, found.break_even_blend, found.to_student_only) == (math.inf, 3.0, 1.0)
    assert "no number of modules for the complete run" in str(found)


def test_a_run_of_blends_is_the_sum_that_one_writes_by_hand(original):
    found = cost(original, METHODS.dcr(sites=SITES), IMAGES, total_steps=TOTAL)
    plain = by_hand(original)
    alone = step_of(plain)
    stream = torch.randn(3, 4, 16)
    with torch.no_grad():
        teacher = counted(lambda: original.blocks[0].attn(stream))
        forward = counted(lambda: original(IMAGES))
    assert found.teachers == {"blocks.0.attn": teacher, "blocks.1.attn": teacher}
    assert found.teacher_pass == forward
    assert found.student_only.flops == alone
    blend, closed = found.phases
    assert blend.flops == alone + 2 * teacher
    assert closed.flops == alone
    assert found.to_student_only == pytest.approx((4 * (alone + 2 * teacher) + 16 * alone) / (20 * alone), rel=1e-12)
    assert found.break_even_blend == pytest.approx(forward / teacher, rel=1e-12)
    assert found.break_even == pytest.approx(20 * forward / (4 * teacher), rel=1e-12)  # extra per module: 4 forwards of it
    assert found.student_only.saved_bytes == closed.saved_bytes == kept_by(plain)


def test_the_break_even_number_of_modules_makes_a_blend_as_dear_as_a_full_teacher(original):
    found = cost(original, METHODS.dcr(sites=SITES, schedule=Constant(alpha=0.5)), IMAGES, total_steps=4)
    (phase,) = found.phases
    per_module = (phase.flops - found.student_only.flops) / 2
    assert found.student_only.flops + found.break_even_blend * per_module == pytest.approx(found.distillation.flops)
    assert found.break_even == pytest.approx(found.break_even_blend)


@pytest.mark.parametrize("train", ["students", "all"])
def test_the_references_are_models_put_together_by_hand(original, train):
    found = cost(original, METHODS.dcr(sites=SITES, train=train), IMAGES, total_steps=TOTAL)
    plain, teacher = by_hand(original, train), copy.deepcopy(original).requires_grad_(False)

    def distilled():
        with torch.no_grad():
            return teacher(IMAGES).sum()  # one more forward of everything; comparing logits is not counted

    assert found.student_only.flops == step_of(plain)
    assert found.distillation.flops == step_of(plain, distilled)
    assert found.student_only.parameters == size(plain)
    expected = size(plain, *(block.attn for block in original.blocks)) if train == "students" else 0
    assert found.phases[0].parameters == size(plain) + size(*(block.attn for block in original.blocks))
    if train == "students":
        assert found.distillation.parameters == expected
    else:  # a backbone that trains needs a whole copy of the original beside it
        assert found.distillation.parameters == found.phases[0].parameters + size(original)


@pytest.mark.parametrize(
    "plan",
    [
        METHODS.dcr_dfg(sites=SITES, guidance=FeatureGuidance(schedule=Constant(alpha=1.0))),
        METHODS.local_fit(sites=SITES, hold=1.0),
    ],
    ids=["guidance to the end", "a local fit to the end"],
)
def test_the_reference_has_no_teacher_where_the_plan_has_one_to_the_end(plan, original):
    found = cost(original, plan, IMAGES, total_steps=TOTAL)
    assert found.student_only == cost(original, METHODS.dcr(sites=SITES), IMAGES, total_steps=TOTAL).student_only


REAL = {
    "dcr_dfg": METHODS.dcr_dfg(sites=SITES),
    "theseus to the end": METHODS.theseus(sites=SITES, schedule=Linear(start=0.9), seed=1),
    "halo, everything trains": METHODS.halo(sites=SITES, train="all"),
}


@pytest.mark.parametrize("name", REAL)
def test_every_step_costs_what_a_real_training_counts(name):
    """A counter around the steps of fit() itself."""
    steps, found = 8, []

    class Metered(CountedBatches):
        def __iter__(self):
            for given in self.batches:
                with FlopCounterMode(display=False) as counter:
                    yield given
                found.append(int(counter.get_total_flops()))

    batches = Metered(count=steps + 1)
    with sdpa_kernel(SDPBackend.MATH):
        segue.fit(Net(depth=2), REAL[name], batches, Classification(), recipe=segue.Recipe(steps=steps), progress=None)
    expected = cost(Net(depth=2), REAL[name], batches.batches[0], total_steps=steps, loss_fn=Classification())
    assert list(expected.per_step[: len(found)]) == found
    assert len(found) >= steps - 1


class Uneven(nn.Module):
    """Three sites of three sizes."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(8, n), nn.Linear(n, 8)) for n in (8, 64, 16))

    def forward(self, x):
        for part in self.parts:
            x = x + part(x)
        return x


def local_fit(**settings):
    phases = (segue.phases.Phase(name="local fit", length=0.5, local=True, **settings), segue.phases.Phase(name="after"))
    return segue.Plan(sites="blocks.*.attn", guidance=FeatureGuidance(), phases=phases)


@pytest.mark.parametrize("split", [1, 2, 3, 16])
def test_a_local_step_is_one_forward_of_the_original_and_its_passes(original, split):
    features = {}

    def learn():
        model = by_hand(original)
        for name, (x, y) in features.items():
            for part in range(split):
                student = model.get_submodule(name)
                error = (student(x[part::split]) - y[part::split]).square().mean()
                torch.autograd.grad(error, list(student.parameters()))

    watched = copy.deepcopy(original).eval()
    for index, block in enumerate(watched.blocks):
        name = f"blocks.{index}.attn"
        block.attn.register_forward_hook(lambda _m, args, out, name=name: features.update({name: (args[0], out)}))
    with torch.no_grad():
        forward = counted(lambda: watched(IMAGES))
    found = cost(original, local_fit(split=split, reuse=5), IMAGES, total_steps=4)
    assert found.teacher_pass == forward
    assert found.per_step[1] == forward + 5 * counted(learn)
    with torch.no_grad():  # that a call can be cut is tried once, on the first part
        proof = counted(lambda: [original.get_submodule(name)(x[::split]) for name, (x, _) in features.items()])
    assert found.per_step[0] == found.per_step[1] + (proof if split > 1 else 0)
    assert found.per_step[2:] == (found.student_only.flops,) * 2


def test_a_local_step_without_a_task_ends_at_the_last_site(original):
    with_task, without = (
        cost(original, local_fit(split=2, reuse=2, task=task), IMAGES, total_steps=4).per_step[1] for task in (1.0, 0.0)
    )
    after, seen = (original.blocks[-1].mlp, original.head), []
    handles = [module.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for module in after]
    with torch.no_grad():
        original(IMAGES)
        for handle in handles:
            handle.remove()
        rest = counted(lambda: [module(x) for module, x in zip(after, seen, strict=True)])
    assert with_task - without == rest > 0


def test_what_does_not_train_costs_no_gradient(original):
    def copied(teacher, site):
        student = copy.deepcopy(teacher)
        student.qkv.reset_parameters()
        return student

    def steps(first):
        plan = METHODS.transfer(sites="blocks.*.attn", student=copied, first=first, hold=0.5)
        return cost(original, plan, IMAGES, total_steps=4).per_step

    every, new = steps("all"), steps("new")
    gradients = sum(2 * len(IMAGES) * original.positions.shape[1] * block.attn.proj.weight.numel() for block in original.blocks)
    assert every[1] - new[1] == gradients
    assert every[2:] == new[2:]


def test_one_local_pass_over_a_batch_costs_at_most_half_a_step_of_student_only_training():
    model = models.build(lambda: timm.create_model("vit_tiny_patch16_224", depth=3))
    found = cost(model, local_fit(split=1, reuse=4), torch.randn(1, 3, 224, 224), total_steps=2)
    ratio = (found.per_step[0] - found.teacher_pass) / 4 / found.student_only.flops
    print(f"one local pass over a batch: {ratio:.3f} of a step of student-only training")
    assert 0 < ratio <= 0.5


def test_sites_of_different_sizes_are_told_apart():
    plan, steps = METHODS.theseus(sites="parts.*", schedule=Linear(start=0.9)), 20
    handover = segue.replace_(models.build(Uneven).train(), plan, total_steps=steps)
    real = []
    for _ in range(steps):
        trained = list(handover.parameters())
        real.append(counted(lambda trained=trained: torch.autograd.grad(mean_square(handover.model, X), trained)))
        handover.step()
    assert list(cost(models.build(Uneven), plan, X, total_steps=steps).per_step) == real
    assert len(set(real)) > 4


def test_a_coin_costs_less_than_a_soft_one_which_costs_a_blend():
    def at(gate):
        plan = segue.Plan(sites=SITES, gate=gate, schedule=Constant(alpha=0.5))
        return cost(Net(depth=2), plan, X, total_steps=30)

    coin, soft, blend = at(Bernoulli()), at(GumbelSoftmax()), at(segue.gates.Blend())
    assert coin.flops < soft.flops == blend.flops


def test_release_lowers_the_parameters_after_takeover(original):
    held, freed = (cost(original, METHODS.dcr(sites=SITES, release=r), IMAGES, total_steps=TOTAL) for r in (False, True))
    teachers = size(*(block.attn for block in original.blocks))
    assert [phase.parameters for phase in held.phases] == [size(original) + teachers] * 2
    assert [phase.parameters for phase in freed.phases] == [size(original) + teachers, size(original)]


@pytest.mark.parametrize(
    "plan",
    [
        METHODS.dcr_dfg(sites=SITES, guidance=FeatureGuidance(schedule=Constant(alpha=1.0)), release=True),
        METHODS.dcr_dfg(sites=SITES, release=True),
        METHODS.dcr(sites=SITES, distill=LogitDistillation(), release=True),
    ],
    ids=["guidance that outlasts takeover", "guidance that ends with it", "distillation"],
)
def test_the_parameters_after_takeover_are_those_of_a_real_run(plan):
    found = cost(Net(depth=2), plan, X, total_steps=TOTAL)
    handover = segue.replace_(Net(depth=2).train(), plan, total_steps=TOTAL)
    for _ in range(8):
        (mean_square(handover.model, X) + handover.aux_loss()).backward()
        handover.step()
    assert found.phases[-1].name == "after takeover"
    assert found.phases[-1].parameters == size(handover.model)


def test_a_shared_layer_is_one_teacher_and_one_student():
    shared = cost(models.build(models.SharedLayers), METHODS.dcr(sites="layers.*"), torch.randn(2, 6), total_steps=10)
    layer = size(models.SharedLayers().layers[0])
    assert shared.phases[0].parameters - shared.student_only.parameters == layer


class Named(nn.Module):
    """Called by position or by name; answers like a Hugging Face model, an index first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, scale=1.0):
        return {"index": torch.arange(3), "logits": self.layer(x) * scale}


@pytest.mark.parametrize("batch", [X, (X, 2.0), [X], {"x": X, "scale": 2.0}], ids=["tensor", "tuple", "list", "dict"])
def test_a_batch_is_what_the_model_is_called_with(batch):
    found = cost(Named(), METHODS.dcr(sites="layer"), batch, total_steps=10)
    assert found.teacher_pass == 2 * 20 * 8 * 8
    assert found.student_only.flops == 2 * 2 * 20 * 8 * 8  # forward, and the gradient of the weight


def test_a_loss_of_ones_own_is_what_is_counted():
    weight = torch.randn(8, 8)

    def loss(model, batch):
        return (model(batch["pixels"])["logits"] @ weight).square().mean()

    plain = cost(Named(), METHODS.dcr(sites="layer"), X, total_steps=10)
    found = cost(Named(), METHODS.dcr(sites="layer"), {"pixels": X}, total_steps=10, loss_fn=loss)
    product = 2 * 20 * 8 * 8
    assert found.student_only.flops == plain.student_only.flops + 2 * product  # forward, and the gradient of its input
    assert found.teacher_pass == plain.teacher_pass + product


def test_models_of_hugging_face_are_counted_with_their_own_loss():
    batch = models.sentences()
    given = {**batch.kwargs, "labels": batch.labels}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = METHODS.dcr_dfg(sites="bert.encoder.layer.*.attention.self")
        found = cost(models.build(models.bert), plan, given, total_steps=100)
    assert 1 < found.to_student_only < 1.2
    assert found.to_distillation < 1


def test_the_model_stays_as_it_is(original):
    before = copy.deepcopy(original.state_dict())
    modules, asked = list(original.modules()), [p.requires_grad for p in original.parameters()]
    rng, mode = torch.get_rng_state(), original.training
    cost(original, METHODS.gumbel_dfg(sites=SITES), IMAGES, total_steps=5)
    assert same_state(original.state_dict(), before)
    assert list(original.modules()) == modules
    assert [p.requires_grad for p in original.parameters()] == asked
    assert all(p.grad is None for p in original.parameters())
    assert torch.equal(torch.get_rng_state(), rng)
    assert original.training == mode


def test_a_run_without_steps_is_refused(original):
    with pytest.raises(PlanError, match=r"cost\(total_steps=...\) must be a positive integer, got 0"):
        cost(original, METHODS.dcr(sites=SITES), IMAGES, total_steps=0)


def test_a_site_whose_operator_has_no_formula_is_not_silently_free():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.lstm = nn.Linear(8, 8), nn.LSTM(8, 8)

        def forward(self, x):
            return self.lstm(self.first(x))[0]

    with pytest.warns(SegueWarning) as said:
        cost(Recurrent(), METHODS.dcr(sites="lstm"), X, total_steps=2)
    words = [str(warning.message) for warning in said]
    assert any("rnn" in word and "which have no formula" in word for word in words)
    assert any("0 operations are counted at 1 of 1 sites ('lstm' first)" in word for word in words)


def test_a_model_of_which_nothing_is_counted_can_still_be_shown():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(8, 8)

        def forward(self, x):
            return self.lstm(x)[0]

    with pytest.warns(SegueWarning) as said:
        found = cost(Whole(), METHODS.dcr(sites="lstm"), X, total_steps=2)
    assert any("0 operations are counted" in str(warning.message) for warning in said)
    assert math.isnan(found.to_student_only)
    assert math.isnan(found.to_distillation)
    assert "nan" in str(found)


def test_an_ordinary_model_is_counted_without_a_warning(original):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cost(original, METHODS.dcr_dfg(sites=SITES), IMAGES, total_steps=5)
        cost(models.build(models.torch_encoder), METHODS.dcr(sites="layers.*.self_attn"), torch.randn(2, 3, models.WIDTH))


def test_it_prints_a_table_and_three_sentences(original):
    found = cost(original, METHODS.dcr(sites=SITES), IMAGES, total_steps=TOTAL)
    table, sentences = str(found).split("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert {len(row) for row in rows} == {8}
    names = ["blend", "after takeover", "complete run", "student-only", "full-teacher distillation"]
    assert [row[0] for row in rows[2:]] == names
    assert [row[1] for row in rows[2:]] == ["4", "16", "20", "20", "20"]
    relative = {row[0]: (float(row[3]), float(row[4])) for row in rows[2:]}
    assert relative["student-only"][0] == relative["full-teacher distillation"][1] == 1.0
    assert relative["complete run"] == pytest.approx((found.to_student_only, found.to_distillation), abs=1e-3)
    share = sum(found.teachers.values()) / found.teacher_pass
    assert f"Replaced: 2 modules, {share:.1%} of a forward of the original." in sentences
    assert f"Break-even with a full teacher: {found.break_even_blend:.1f} modules like these" in sentences
    assert f"{found.break_even:.1f} modules for the complete run (this plan replaces 2)." in sentences


def test_it_travels_as_plain_data(original):
    found = cost(original, METHODS.dcr(sites=SITES), IMAGES, total_steps=TOTAL)
    data = json.loads(json.dumps(found.to_dict()))
    assert "per_step" not in data
    assert data["steps"] == TOTAL
    again = Cost.from_dict(data)
    assert again.phases == found.phases
    assert (again.student_only, again.distillation) == (found.student_only, found.distillation)
    assert again.flops == pytest.approx(found.flops)
    assert (again.break_even, again.break_even_blend) == (pytest.approx(found.break_even), found.break_even_blend)
