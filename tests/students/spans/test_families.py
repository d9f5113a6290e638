"""Spans in the families that people have: the teacher is the untouched model, and what is left can be rebuilt and loaded."""

import json

import pytest
import torch
from torch import nn

import segue
from segue.errors import HandoverError, SiteError, StudentError
from segue.students import OneLayer
from tests.helpers.models import build
from tests.students.spans.families import ALTERNATING, DEBERTA, ENCODER, FAMILIES, TOKENS, Family, causal, plain, random


@torch.no_grad()
def predict(model: nn.Module, batch) -> torch.Tensor:
    output = model.eval()(**batch)
    if hasattr(output, "feature_maps"):
        return torch.cat([features.flatten() for features in output.feature_maps])
    return output if isinstance(output, torch.Tensor) else output[0]


def begin(family: Family, model: nn.Module, **settings) -> segue.Handover:
    student = OneLayer(which=family.which)
    return segue.replace_(model, segue.Plan(sites=segue.Span(family.layers), student=student), total_steps=2, **settings)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_teacher_is_the_untouched_model_and_the_rest_is_rebuilt_from_its_configuration(name, tmp_path):
    family = FAMILIES[name]
    model, batch = build(family.make).eval(), family.batch
    original = predict(model.requires_grad_(False), batch)  # frozen: torch has other kernels for frozen weights
    handover = begin(family, model, example=batch)
    assert torch.equal(predict(model, batch), original)
    with handover.as_teacher():
        assert torch.equal(predict(model, batch), original)
    handover.verify(**batch)
    with handover.as_student():
        alone = predict(model, batch)
    assert not torch.equal(alone, original)
    handover.finalize_(force=True)
    assert torch.equal(predict(model, batch), alone)
    layers = handover.sites[0].name.rpartition(".")[0]
    assert len(model.get_submodule(layers)) == len(handover.sites)
    segue.save(model, tmp_path)
    assert torch.equal(predict(segue.load_(build(family.make, seed=1), tmp_path), batch), alone)
    if family.count:
        saved = json.loads(model.config.to_json_string())  # as save_pretrained writes it
        assert saved[family.count] == ([2, 1] if family.count == "depths" else 2)
        again = type(model)(type(model.config).from_dict(saved))
        again.load_state_dict(model.state_dict())
        assert torch.equal(predict(again, batch), alone)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_the_other_half_of_a_model_keeps_its_layers(part):
    family = FAMILIES[f"BART, {part}"]
    model = build(family.make)
    begin(family, model).finalize_(force=True)
    assert (model.config.encoder_layers, model.config.decoder_layers) == ((2, 4) if part == "encoder" else (4, 2))


def test_both_halves_at_once():
    family = FAMILIES["T5, decoder"]
    model = build(family.make).eval()
    spans = [segue.Span("encoder.block", every=4), segue.Span("decoder.block", first=1, last=2)]
    handover = segue.replace_(model, segue.Plan(sites=spans, student=OneLayer()), total_steps=2)
    handover.verify(**family.batch)
    handover.finalize_(force=True)
    assert (model.config.num_layers, model.config.num_decoder_layers) == (1, 3)
    assert (model.encoder.config.num_layers, model.decoder.config.num_layers) == (1, 3)
    assert [block.layer[0].SelfAttention.layer_idx for block in model.decoder.block] == [0, 1, 2]


def test_a_copy_of_another_kind_of_layer_is_refused():
    family = FAMILIES["Gemma 3"]
    model = build(family.make)
    with pytest.raises(StudentError, match=r"'self_attn.layer_type' is full_attention, not sliding_attention, and the student"):
        begin(family._replace(which=1), model)
    assert model.config.layer_types == ALTERNATING
    with pytest.raises(StudentError, match=r"In 'layer_types' it is full_attention, not chunked_attention"):
        begin(FAMILIES["Llama 4"]._replace(which=1), build(FAMILIES["Llama 4"].make))


def test_a_span_that_leaves_no_attention_is_refused_before():
    model = build(lambda: FAMILIES["Qwen3-Next"].make(layer_types=["linear_attention", "full_attention"] * 2))
    with pytest.raises(SiteError, match=r"the span leaves no layer with attention in 'model.layers'"):
        begin(FAMILIES["Qwen3-Next"], model)
    assert len(model.model.layers) == model.config.num_hidden_layers == 4


def test_layers_whose_class_is_decided_by_their_position_are_refused_before():
    mamba = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
    period = {"attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 2, "num_experts_per_tok": 1}
    family = causal("Jamba", **mamba, **period)
    with pytest.raises(SiteError, match=r"which of the layers of 'model.layers' is of which class.\n  In the shorter model"):
        begin(family, build(family.make))


def test_a_model_that_cannot_run_with_fewer_layers_is_refused_before():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            return self.layers[3](self.layers[2](self.layers[1](self.layers[0](x))))

    with pytest.raises(StudentError, match=r"the shorter Counting cannot be called with the example.\n  It raises IndexError"):
        segue.replace_(Counting(), segue.Plan(sites=segue.Span("layers")), total_steps=1, example=torch.ones(1, 4))


def test_a_model_that_changes_the_hidden_state_between_layers_is_refused():
    settings = {**DEBERTA, "conv_kernel_size": 3}
    family = plain("DebertaV2", "DebertaV2ForSequenceClassification", TOKENS, "encoder.layer", "num_hidden_layers", **settings)
    model = build(family.make)
    with pytest.raises(HandoverError, match=r"The model changes what 'deberta.encoder.layer.0' returns before it calls"):
        begin(family, model, example=family.batch)
    handover = begin(family._replace(layers="encoder.layer"), model)
    with pytest.raises(HandoverError, match=r"do not follow one another"):
        predict(model, family.batch)
    handover.cancel_()
    later = segue.Plan(sites=segue.Span("encoder.layer", first=2), student=OneLayer())
    segue.replace_(model, later, total_steps=1, example=family.batch).verify(**family.batch)


def test_what_a_configuration_cannot_describe_is_listed_before_anything_changes():
    family = FAMILIES["T5, encoder"]._replace(which=1)
    with pytest.warns(
        segue.errors.SegueWarning, match=r"cannot be rebuilt .*relative_attention_bias is False, and rebuilt True"
    ):
        begin(family, build(family.make))
    family = FAMILIES["Swin"]._replace(which=1)
    with pytest.warns(segue.errors.SegueWarning, match=r"layers.1.blocks.0.shift_size is 1, and rebuilt 0"):
        handover = begin(family, build(family.make))
    handover.finalize_(force=True)  # and not a second time
    assert [block.shift_size for block in handover.model.swin.encoder.layers[1].blocks] == [1]


def test_the_hidden_states_that_a_model_returns_stay_at_their_positions():
    model = build(plain("Bert", "BertModel", {}, "", "", **ENCODER, max_position_embeddings=16).make).eval()
    counts, batch = [], {**TOKENS, "output_hidden_states": True}
    original = model(**batch).hidden_states
    model.register_forward_hook(lambda _model, _args, output: counts.append(len(output.hidden_states)))
    plan = segue.Plan(sites=segue.Span("encoder.layer"), student=OneLayer(), schedule=segue.schedules.Constant(alpha=0.5))
    handover = segue.replace_(model, plan, total_steps=1, example=batch)
    assert counts[0] == 5  # the students that are tried in between are not among them
    with handover.as_teacher():
        assert all(torch.equal(a, b) for a, b in zip(model(**batch).hidden_states, original, strict=True))
    with handover.as_student():
        alone = model(**batch).hidden_states
    assert torch.equal(alone[1], alone[2])
    blended = model(**batch).hidden_states
    assert torch.equal(blended[1], original[1])
    torch.testing.assert_close(blended[2], torch.lerp(original[2], alone[2], 0.5))
    handover.verify(**batch)
    handover.finalize_(force=True)
    finished = model(**batch).hidden_states
    assert [torch.equal(a, b) for a, b in zip(finished, (alone[0], alone[2], alone[4]), strict=True)] == [True] * 3


def diffusers_case(name: str) -> Family:
    diffusers = pytest.importorskip("diffusers")
    latents = {"hidden_states": random(2, 4, 8, 8), "timestep": torch.tensor([1, 2])}
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 4}
    image = {"in_channels": 4, "sample_size": 8, "patch_size": 2}
    prompt = {"encoder_hidden_states": random(2, 5, 16), "pooled_projections": random(2, 16)}
    if name == "DiT":
        settings = {**heads, **image, "norm_type": "ada_norm_zero", "num_embeds_ada_norm": 10, "norm_num_groups": 4}
        batch = {**latents, "class_labels": torch.tensor([1, 2])}
        return Family(lambda: diffusers.DiTTransformer2DModel(**settings), batch, "transformer_blocks", "")
    joint = {**heads, "joint_attention_dim": 16, "pooled_projection_dim": 16}
    if name == "SD3":  # the last block has no second stream after its attention, so the copy is that of the last
        settings = {**joint, **image, "caption_projection_dim": 16, "out_channels": 4, "pos_embed_max_size": 16}
        return Family(lambda: diffusers.SD3Transformer2DModel(**settings), {**latents, **prompt}, "transformer_blocks", "", -1)
    settings = {**joint, "in_channels": 4, "num_single_layers": 2, "axes_dims_rope": (2, 2, 4)}
    places = {"img_ids": torch.zeros(6, 3), "txt_ids": torch.zeros(5, 3)}
    batch = {**prompt, **places, "hidden_states": random(2, 6, 4), "timestep": torch.tensor([1.0, 2.0])}
    return Family(lambda: diffusers.FluxTransformer2DModel(**settings), batch, "transformer_blocks", "")


@pytest.mark.parametrize("name", ["DiT", "SD3", "FLUX"])
def test_diffusers(name, tmp_path):
    family = diffusers_case(name)
    model, batch = build(family.make).eval(), family.batch
    original = predict(model.requires_grad_(False), batch)
    handover = begin(family, model, example=batch)
    assert torch.equal(predict(model, batch), original)
    handover.verify(**batch)
    with handover.as_student():
        alone = predict(model, batch)
    handover.finalize_(force=True)
    assert model.config.num_layers == len(model.transformer_blocks) == 2
    again = type(model).from_config(dict(model.config))
    again.load_state_dict(model.state_dict())
    assert torch.equal(predict(again.eval(), batch), alone)


class VitPytorch(nn.Module):
    """The code of vit-pytorch, and of x-transformers: layers are lists of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(4))

    def forward(self, x):
        for attention, mlp in self.layers:
            x = x + attention(x)
            x = x + mlp(x)
        return x


def test_layers_that_are_lists_of_parts_are_refused():
    with pytest.raises(SiteError, match=r"that the model never calls.\n  'layers.0' is an nn.ModuleList: the code around it"):
        segue.replace_(VitPytorch(), segue.Plan(sites=segue.Span("layers")), total_steps=1)
