"""Several layers by one, in BERT, GPT-2, Llama and timm's ViT: the handover, what is left of the model, and its files."""

import pytest
import torch
import transformers
from torch import nn

import segue
from segue.core.shortening import finished_name
from segue.errors import SiteError, StudentError
from segue.gates import Bernoulli
from segue.losses import FeatureGuidance, OnTeacherStream
from segue.schedules import Constant, Linear
from segue.students import OneLayer, Reinit, WindowedLinear
from segue.students.layers import Chain
from tests.helpers.models import CLASSES, VOCABULARY, build, images, sentences, text, timm_vit

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 4}


def bert() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "num_labels": CLASSES, **SIZES}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **SIZES))


def vit() -> nn.Module:
    return timm_vit("vit_tiny_patch16_224", 3, depth=4)()


CASES = {
    "BERT": (bert, sentences, "encoder.layer", "bert.encoder.layer"),
    "GPT-2": (gpt2, text, "transformer.h", "transformer.h"),
    "Llama": (llama, text, "model.layers", "model.layers"),
    "timm ViT": (vit, images, "blocks", "blocks"),
}
PLANS = {
    "DCR, first layers": {"student": OneLayer()},
    "DCR, fresh layers": {"student": Reinit()},
    "Theseus": {"student": OneLayer(which=-1), "gate": Bernoulli()},
    "guided": {"student": OneLayer(), "guidance": FeatureGuidance()},
}


def train(handover: segue.Handover, batch, steps: int) -> None:
    optimizer = torch.optim.AdamW(handover.parameters(), lr=1e-2)
    for _ in range(steps):
        (batch.loss(handover.model.train()) + handover.aux_loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        handover.step()


@pytest.mark.parametrize("settings", PLANS)
@pytest.mark.parametrize("case", CASES)
def test_k_layers_become_one(case, settings, tmp_path):
    make, batch, selector, layers = CASES[case]
    model, batch = build(make), batch()
    original = batch.predict(model)
    plan = segue.Plan(sites=segue.Span(selector, every=2), schedule=Linear(until=0.8), **PLANS[settings])
    handover = segue.replace_(model, plan, total_steps=4, example=batch.kwargs or batch.args)
    assert [site.members for site in handover.sites] == [(f"{layers}.{i}", f"{layers}.{i + 1}") for i in (0, 2)]
    assert torch.equal(batch.predict(model), original)
    handover.verify(*batch.args, **batch.kwargs)
    names = [name for name, _ in handover.named_parameters()]

    train(handover, batch, 4)
    with handover.as_teacher():
        assert torch.equal(batch.predict(model), original)
    with handover.as_student():
        alone = batch.predict(model)
    handover.finalize_()
    assert torch.equal(batch.predict(model), alone)
    assert not torch.equal(alone, original)
    assert len(model.get_submodule(layers)) == 2
    assert set(names) == {name for name, _ in model.named_parameters() if name.startswith(layers)}

    segue.save(model, tmp_path / "segue")
    again = segue.load_(build(make, seed=1), tmp_path / "segue")
    assert torch.equal(batch.predict(again), alone)
    if case == "timm ViT":
        assert [info["module"] for info in model.feature_info] == ["blocks.0", "blocks.1"]
    else:
        assert again.config.num_hidden_layers == model.config.num_hidden_layers == 2
        model.save_pretrained(tmp_path / "hf")  # its layers are of the family's own kind: no Segue is needed to load it
        plain = type(model).from_pretrained(tmp_path / "hf")
        assert torch.equal(batch.predict(plain), alone)


def test_a_running_handover_stops_and_resumes(tmp_path):
    plan = segue.Plan(sites=segue.Span("encoder.layer"), student=OneLayer(), schedule=Linear())
    handover = segue.replace_(build(bert), plan, total_steps=6)
    train(handover, sentences(), 3)
    segue.save(handover, tmp_path)
    again = segue.load_(build(bert), tmp_path)
    assert again.alphas == handover.alphas
    assert torch.equal(sentences().predict(again.model), sentences().predict(handover.model))


def test_cancel_brings_every_layer_back():
    model = build(llama)
    original, layers = text().predict(model), list(model.model.layers)
    handover = segue.replace_(model, segue.Plan(sites=segue.Span("model.layers"), student=OneLayer()), total_steps=4)
    train(handover, text(), 2)
    handover.cancel_()
    assert list(model.model.layers) == layers
    assert model.config.num_hidden_layers == 4
    assert torch.equal(text().predict(model), original)


@pytest.mark.parametrize("make", [gpt2, llama], ids=["GPT-2", "Llama"])
def test_the_shorter_model_generates_with_its_cache(make):
    model = build(make).eval()
    handover = segue.replace_(model, segue.Plan(sites=segue.Span({gpt2: "h", llama: "layers"}[make])), total_steps=1)
    handover.step()
    handover.finalize_()
    ids = torch.arange(2, 8).view(2, 3)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, use_cache=True, **settings), model.generate(ids, use_cache=False, **settings))


def test_a_part_of_the_layers_and_a_second_replacement_reload(tmp_path):
    model = build(llama)
    span = segue.Span("layers", every=2, first=1, last=2)
    handover = segue.replace_(model, segue.Plan(sites=span, student=OneLayer()), total_steps=1)
    assert next(name for name, _ in handover.named_parameters()).startswith("model.layers.1.")
    handover.step()
    handover.finalize_()
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2]
    handover = segue.replace_(
        model, segue.Plan(sites="model.layers.*.self_attn", student=WindowedLinear(window=3)), total_steps=1
    )
    handover.step()
    handover.finalize_()
    segue.save(model, tmp_path)
    again = segue.load_(build(llama, seed=2), tmp_path)
    assert torch.equal(text().predict(again), text().predict(model))


def test_a_model_that_does_not_fit_is_left_as_it_was(tmp_path):
    model = build(bert)
    handover = segue.replace_(model, segue.Plan(sites=segue.Span("encoder.layer"), student=OneLayer()), total_steps=1)
    handover.step()
    handover.finalize_()
    segue.save(model, tmp_path)
    wider = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=VOCABULARY, max_position_embeddings=16, num_labels=CLASSES, **{**SIZES, "intermediate_size": 48}
        )
    )
    with pytest.raises(segue.errors.CheckpointError):
        segue.load_(wider, tmp_path)
    assert len(wider.bert.encoder.layer) == wider.config.num_hidden_layers == 4
    assert [layer.attention.self.layer_idx for layer in wider.bert.encoder.layer] == [0, 1, 2, 3]


def test_the_gradient_passes_a_spans_teachers_unless_told():
    model = build(vit)
    handover = segue.replace_(model, segue.Plan(sites=(segue.Span("blocks", last=1), "blocks.3.attn")), total_steps=1)
    assert [seam.teacher_gradient for seam in handover.seams.values()] == [True, False]
    handover.cancel_()
    handover = segue.replace_(model, segue.Plan(sites=segue.Span("blocks"), teacher_gradient=False), total_steps=1)
    assert [seam.teacher_gradient for seam in handover.seams.values()] == [False, False]


@pytest.mark.parametrize("trained", ["students", "all"])
def test_guidance_on_the_teachers_stream_looks_behind_the_last_layer(trained):
    plan = segue.Plan(
        sites=segue.Span("blocks"),
        student=OneLayer(),
        schedule=Constant(alpha=0.0),
        guidance=OnTeacherStream(then=FeatureGuidance(schedule=Constant(alpha=1.0))),
        train=trained,
    )
    model = build(vit)
    seen: list[torch.Tensor] = []
    model.blocks[1].register_forward_hook(lambda _m, _a, output: seen.append(output))
    batch = images()
    batch.predict(model)
    handover = segue.replace_(model, plan, total_steps=2)
    batch.loss(model.eval())
    model.train()
    batch.loss(model)
    expected = plan.guidance(seen[0], first_output(handover, batch), None)
    model.train()
    handover.losses()
    batch.loss(model)
    torch.testing.assert_close(handover.losses()["guidance/blocks.0"], expected)


def first_output(handover: segue.Handover, batch) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    handle = handover.seams["blocks.0"].student.register_forward_hook(lambda _m, _a, output: kept.append(output))
    with torch.no_grad(), handover.as_student():
        handover.model.train()
        handover.model(*batch.args)
    handle.remove()
    return kept[0]


def test_layers_that_return_tuples_are_followed():
    class InTuple(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(factor))

        def forward(self, hidden_states, mask=None):
            return (hidden_states * self.factor, mask)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(InTuple(float(i)) for i in (2, 3, 5, 7))

        def forward(self, x):
            for layer in self.layers:
                x = layer(hidden_states=x, mask=None)[0]
            return x

    model = Model()
    handover = segue.replace_(model, segue.Plan(sites=segue.Span("layers"), student=OneLayer()), total_steps=1)
    assert model(torch.ones(2)).tolist() == [210.0, 210.0]
    handover.step()
    assert model(torch.ones(2)).tolist() == [10.0, 10.0]
    handover.finalize_()
    assert model(torch.ones(2)).tolist() == [10.0, 10.0]


@pytest.mark.slow
def test_compiled_as_one_graph():
    torch._dynamo.reset()
    model, batch = build(vit), images()
    handover = segue.replace_(model, segue.Plan(sites=segue.Span("blocks"), student=OneLayer()), total_steps=2)
    eager = batch.logits(model.train())
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*batch.args), eager)
    handover.step()
    handover.step()
    with handover.as_student():
        alone = batch.logits(model)
    torch.testing.assert_close(compiled(*batch.args), alone)


@pytest.mark.parametrize(
    ("span", "says"),
    [
        (segue.Span("blokcs"), "Nearest names"),
        (segue.Span("blocks", every=3), "The list has 4 layers, of which it selects 4"),
        (segue.Span("blocks", every=1), "does not divide the layers of 'blocks' into groups of at least 2"),
        (segue.Span("blocks", first=3, last=4), "of which it selects 1"),
        ([segue.Span("blocks"), "blocks.1.attn"], "one is inside the other"),
    ],
)
def test_what_a_span_cannot_be(span, says):
    model = build(vit)
    with pytest.raises(SiteError, match=says):
        segue.replace_(model, segue.Plan(sites=span), total_steps=1)
    assert len(model.blocks) == 4


def test_a_name_that_fits_two_lists_is_refused():
    with pytest.raises(SiteError, match="They are a.layers, b.layers"):
        parts = {name: nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)] * 2)}) for name in "ab"}
        segue.select(nn.ModuleDict(parts), segue.Span("layers"))


def test_shared_layers_are_no_span():
    with pytest.raises(SiteError, match="selects a shared layer of 'layers'"):
        segue.select(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)] * 2)}), segue.Span("layers"))


def test_one_layer_needs_a_span():
    with pytest.raises(StudentError, match="It is Linear"):
        segue.replace_(nn.Sequential(nn.Linear(2, 2)), segue.Plan(sites="0", student=OneLayer()), total_steps=1)
    with pytest.raises(StudentError, match="It is a span of 2 layers"):
        segue.replace_(build(vit), segue.Plan(sites=segue.Span("blocks"), student=OneLayer(which=2)), total_steps=1)


def test_a_plan_with_a_span_survives_json():
    plan = segue.Plan(sites=(segue.Span("blocks", every=2, first=2), "head"), student=OneLayer(which=1))
    assert segue.Plan.from_dict(plan.to_dict()) == plan
    site = segue.select(build(vit), segue.Span("blocks"))[1]
    assert segue.select(build(vit), site.pattern)[0].members == site.members


def test_finished_names():
    sites = segue.select(build(vit), segue.Span("blocks"))
    assert finished_name("blocks.2.attn.qkv.weight", sites) == "blocks.1.attn.qkv.weight"
    assert finished_name("norm.weight", sites) == "norm.weight"


def test_reinit_of_a_span_is_one_fresh_layer():
    chain = Chain([nn.Linear(3, 3), nn.Linear(3, 3)])
    student = Reinit()(chain, segue.Site("layers.0"))
    assert isinstance(student, nn.Linear)
    assert student.bias.abs().sum() == 0
    assert not torch.equal(student.weight, chain.layers[0].weight)
