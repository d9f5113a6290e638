"""Causal language models of Hugging Face: each is read, equals its teacher with softmax, trains, and decodes as it reads."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache

import segue
from segue.errors import SegueWarning, StudentError
from segue.students import LinearAttention, Performer, SlidingWindow, Softmax, WindowedLinear
from segue.students.attention.module import Operator
from tests.helpers import models
from tests.helpers.models import VOCABULARY, WIDTH

pytestmark = pytest.mark.filterwarnings("ignore:.* (looks at all tokens|leaves the .* out):segue.errors.SegueWarning")

SELF = r"re:.*\.(self_attn|attn|attention|self_attention)"
SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
EXPERTS = {
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
}
GPT = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64}
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6, **EXPERTS}
LATENT |= {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
ROPE = {"rope_type": "default", "rope_theta": 1e4}


@dataclass(frozen=True)
class Decoder:
    """A family, and what its tiny model is made with."""

    family: str
    own: dict[str, Any] = field(default_factory=dict)
    sites: str = SELF
    features: tuple[str, ...] = ()  # what operators without softmax leave out
    eager: bool = False  # it has no other implementation on a CPU
    head_dim: bool = True

    def build(self, **settings: Any) -> nn.Module:
        size = {"head_dim": 8} if self.head_dim else {}
        calm = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
        sizes = {**SIZES, **size, **calm, "tie_word_embeddings": False, **self.own, **settings}
        config = transformers.AutoConfig.for_model(self.family, **sizes)
        make = transformers.AutoModelForCausalLM.from_config
        return models.build(lambda: make(config, attn_implementation=settings.get("attn_implementation", "eager"))).eval()

    def handing_over(self, model: nn.Module, student: Any, **plan: Any) -> segue.Handover:
        return segue.replace_(model, segue.Plan(sites=self.sites, student=student, **plan), total_steps=2)


DECODERS = {
    **{
        name: Decoder(name)
        for name in (
            *("llama", "gemma", "granite", "starcoder2", "olmo", "olmo2", "cohere", "glm", "glm4", "nemotron", "ernie4_5"),
            *("helium", "phi", "phi3", "seed_oss", "arcee", "apertus", "qwen2", "qwen3", "hunyuan_v1_dense", "bitnet"),
            *("nanochat", "persimmon"),
        )
    },
    **{name: Decoder(name, EXPERTS) for name in ("mixtral", "qwen3_moe", "phimoe", "olmoe")},
    **{name: Decoder(name, SLIDING) for name in ("cohere2", "gemma3_text", "exaone4", "olmo3", "ministral")},
    "mistral": Decoder("mistral", {"sliding_window": 4}),
    "smollm3": Decoder("smollm3", {"no_rope_layers": [1, 0]}),
    "stablelm": Decoder("stablelm", {"qk_layernorm": True}),
    "olmo, clipped": Decoder("olmo", {"clip_qkv": 0.3}),
    "falcon_h1": Decoder("falcon_h1", {"key_multiplier": 0.3, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}),
    "gemma2": Decoder("gemma2", SLIDING, features=("softcap",), eager=True),
    "gpt_oss": Decoder("gpt_oss", {**SLIDING, **EXPERTS}, features=("sinks",), eager=True),
    "llama4_text": Decoder(
        "llama4_text",
        {"no_rope_layers": [1, 0], "floor_scale": 3, "attention_chunk_size": 4, "intermediate_size_mlp": 32, **EXPERTS},
    ),
    "ministral3": Decoder(
        "ministral3", {"rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 3}}
    ),
    "gpt2": Decoder("gpt2", GPT),
    "gpt_bigcode": Decoder("gpt_bigcode", GPT),
    "gpt_neox": Decoder("gpt_neox", head_dim=False),
    "gptj": Decoder("gptj", {**GPT, "rotary_dim": 4}, eager=True),
    "codegen": Decoder("codegen", {**GPT, "rotary_dim": 4}, eager=True),
    "gpt_neo": Decoder(
        "gpt_neo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
        r"re:.*\.attn\.attention",
        eager=True,
        head_dim=False,
    ),
    "ctrl": Decoder("ctrl", {**GPT, "dff": 32}, r"re:.*\.multi_head_attention"),
    "openai-gpt": Decoder("openai-gpt", GPT, eager=True),
    "opt": Decoder("opt", {"ffn_dim": 32, "word_embed_proj_dim": WIDTH}, head_dim=False),
    "xglm": Decoder(
        "xglm", {"d_model": WIDTH, "ffn_dim": 32, "num_layers": 2, "attention_heads": 4}, head_dim=False, eager=True
    ),
    "biogpt": Decoder("biogpt", head_dim=False),
    "bloom": Decoder("bloom", {"n_head": 4, "n_layer": 2}, features=("bias",), eager=True, head_dim=False),
    "mpt": Decoder(
        "mpt",
        {"d_model": WIDTH, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        features=("bias",),
        eager=True,
        head_dim=False,
    ),
    "falcon": Decoder("falcon", head_dim=False),
    "falcon, groups": Decoder("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, head_dim=False),
    "falcon, all heads": Decoder("falcon", {"multi_query": False}, head_dim=False),
    "falcon, alibi": Decoder("falcon", {"alibi": True}, features=("bias",), head_dim=False),
    "dbrx": Decoder(
        "dbrx",
        {
            "d_model": WIDTH,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.3, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1},
        },
        head_dim=False,
    ),
    "qwen3_next": Decoder(
        "qwen3_next",
        {
            **EXPERTS,
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 16,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        r"re:.*\.self_attn",
    ),
    "afmoe": Decoder("afmoe", {**EXPERTS, **SLIDING}),
    "deepseek_v2": Decoder("deepseek_v2", LATENT, head_dim=False),
    "deepseek_v3": Decoder("deepseek_v3", LATENT, head_dim=False),
    "deepseek_v3, by halves": Decoder("deepseek_v3", {**LATENT, "q_lora_rank": None, "rope_interleave": False}, head_dim=False),
    "mimo_v2_flash": Decoder("mimo_v2_flash", {**EXPERTS, "v_head_dim": 4}, features=("sinks",), eager=True),
}
each = pytest.mark.parametrize("name", DECODERS)

IDS = torch.randint(1, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))
LEFT = (torch.arange(9) >= torch.tensor([[0], [2], [4]])).long()


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@torch.no_grad()
def logits(model: nn.Module, mask: Tensor, pieces: tuple[int, ...] = (), **settings: Any) -> Tensor:
    """Call a model with all tokens, or with some at a time and a cache; return the logits of those that are not padding."""
    positions, found = (mask.cumsum(1) - 1).clamp_min(0), []
    cache = DynamicCache(config=model.config) if pieces else None
    for begin, end in zip((0, *pieces), (*pieces, IDS.shape[1]), strict=True):
        call = {"attention_mask": mask[:, :end], "past_key_values": cache, "use_cache": cache is not None, **settings}
        if model.config.model_type not in ("bloom", "mpt"):  # they have distances, not positions
            call["position_ids"] = positions[:, begin:end]
        found.append(model(input_ids=IDS[:, begin:end], **call).logits)
    return torch.cat(found, dim=1)[mask.bool()]


def implementations(decoder: Decoder) -> tuple[str, ...]:
    return ("eager",) if decoder.eager else ("eager", "sdpa")


@each
def test_softmax_students_equal_their_teachers(name: str) -> None:
    """With padding on either side."""
    decoder = DECODERS[name]
    for implementation in implementations(decoder):
        model = decoder.build(attn_implementation=implementation)
        expected = [logits(model, mask) for mask in (LEFT, LEFT.flip(1))]
        with decoder.handing_over(model, Softmax()).as_student():
            for mask, right in zip((LEFT, LEFT.flip(1)), expected, strict=True):
                close(logits(model, mask), right)


BEYOND = {
    "diffllama": (Decoder("diffllama"), "difference of two softmax attentions"),
    "doge": (Decoder("doge"), "Its mask is computed from its values"),
    "minimax": (Decoder("minimax", {**EXPERTS, "layer_types": ["linear_attention"] * 2}), "linear attention that decays"),
    "jetmoe": (Decoder("jetmoe", {"kv_channels": 8, **EXPERTS}, r"re:.*\.self_attention"), "computed by experts"),
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_no_spec_can_say_is_refused_with_its_reason(name: str) -> None:
    decoder, reason = BEYOND[name]
    model = decoder.build()
    with pytest.raises(StudentError, match=rf"(?s)Segue cannot read the module at site .*{reason}.*AttentionSpec has no field"):
        decoder.handing_over(model, Softmax())


@pytest.mark.parametrize(
    ("name", "said"), [("gemma2", "cap of the logits"), ("gpt_oss", "attention sinks"), ("bloom", "position bias")]
)
def test_what_an_operator_cannot_honour_is_refused_or_left_out_with_a_warning(name: str, said: str) -> None:
    decoder = DECODERS[name]
    model = decoder.build()
    feature = decoder.features[0]
    hint = rf"SlidingWindow keeps them; LinearAttention\(ignore=\('{feature}',\)\) leaves them out. Nothing was changed."
    with pytest.raises(StudentError, match=rf"(?s)LinearAttention cannot honour the {said} of site .*{hint}"):
        decoder.handing_over(model, LinearAttention())
    with pytest.warns(SegueWarning, match=f"LinearAttention leaves the {said} of its teacher out"):
        decoder.handing_over(model, LinearAttention(ignore=(feature, "window")))


@pytest.mark.parametrize(
    ("name", "cache"), [("gpt_oss", "static"), ("gemma3_text", "static"), ("gemma2", "dynamic"), ("bloom", "dynamic")]
)
@pytest.mark.parametrize("kind", [SlidingWindow, Softmax, LinearAttention])
def test_generation_past_the_window_equals_that_without_a_cache(name: str, cache: str, kind: type[Operator]) -> None:
    decoder = DECODERS[name]
    model = decoder.build(eos_token_id=None, bos_token_id=None)
    decoder.handing_over(model, operator(kind, decoder)).finalize_(force=True)
    settings = {"attention_mask": LEFT, "max_new_tokens": 6, "do_sample": False}
    whole = model.generate(IDS, **settings, use_cache=False)
    assert torch.equal(model.generate(IDS, **settings, cache_implementation=cache), whole)
    assert len(whole[:, IDS.shape[1] :].unique()) > 1


@pytest.mark.parametrize("name", ["gpt_oss", "bloom", "llama4_text", "gptj"])
@pytest.mark.parametrize("kind", [SlidingWindow, Softmax])
def test_finished_models_are_copied_pickled_and_loaded(name: str, kind: type[Operator]) -> None:
    decoder = DECODERS[name]
    made = [decoder.build(), decoder.build()]
    with torch.no_grad():
        for parameter in made[1].parameters():
            parameter.mul_(0.9)
    for model in made:
        decoder.handing_over(model, operator(kind, decoder)).finalize_(force=True)
    model, fresh = made
    fresh.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fresh):
        assert torch.equal(logits(other, LEFT), logits(model, LEFT))


def other_operator(name: str, kinds: tuple[type[Operator], ...] = (Softmax, WindowedLinear, Performer)) -> type[Operator]:
    """Take turns: which one a family gets makes no difference to how the family is read."""
    return kinds[list(DECODERS).index(name) % len(kinds)]


def operator(kind: type[Operator], decoder: Decoder) -> Operator:
    """Return an operator with a window that is shorter than the text, which leaves out what it cannot honour."""
    settings: dict[str, Any] = {"window": 3} if kind in (SlidingWindow, WindowedLinear) else {}
    lacking = [feature for feature in decoder.features if feature not in kind.mixer_class.honours]
    return kind(ignore=tuple(lacking), **settings)


@each
def test_cached_logits_equal_those_without_a_cache_and_the_future_does_not_leak(name: str) -> None:
    decoder = DECODERS[name]
    if name == "openai-gpt":
        pytest.skip("it has no cache")
    for kind in (SlidingWindow, LinearAttention, other_operator(name)):
        model = decoder.build()
        decoder.handing_over(model, operator(kind, decoder)).finalize_(force=True)
        whole = logits(model, LEFT)
        close(logits(model, LEFT, (6, 7, 8)), whole)
        with torch.no_grad():
            changed = model(IDS.clone().index_fill_(1, torch.tensor([8]), 7), use_cache=False).logits
            close(changed[:, :8], model(IDS, use_cache=False).logits[:, :8])


@each
def test_students_train(name: str) -> None:
    decoder = DECODERS[name]
    for kind in (
        (LinearAttention, SlidingWindow) if decoder.features else (other_operator(name, (LinearAttention, SlidingWindow)),)
    ):
        model = decoder.build()
        handover = decoder.handing_over(model, operator(kind, decoder), schedule=segue.schedules.Constant(alpha=0.5))
        handover.step()
        loss = model(IDS, attention_mask=LEFT, labels=IDS).loss
        loss.backward()
        assert loss.isfinite()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in handover.parameters())
