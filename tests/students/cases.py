"""Every family of attention, and a trial of an operator on one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import segue
from segue.errors import SegueError
from segue.students.attention.module import Operator
from tests.helpers import models
from tests.helpers.models import CLASSES, VOCABULARY, WIDTH, Batch
from tests.students.attention.mixers import found

TOKENS = models.TOKENS

OPERATORS = found.IN_MODELS
CAUSAL = [name for name, operator in OPERATORS.items() if operator.mixer_class.supports_causal]
ONE_OF_EACH = [next(x for x in OPERATORS.values() if type(x) is kind) for kind in found.KINDS]


@dataclass(frozen=True)
class Family:
    """A model that calls attention in one way, how to call the model, and what its attention is made of."""

    name: str
    make: Callable[..., nn.Module]
    batch: Callable[[], Batch]
    sites: str
    spec: dict[str, Any]  # what an AttentionSpec of its attention should say
    settings: dict[str, Any] = field(default_factory=dict)
    causal: bool = False
    hugging_face: bool = False

    def build(self, seed: int = 0, **settings: Any) -> nn.Module:
        return models.build(self.make, seed, **{**self.settings, **settings})

    def plan(self, student: Any, **settings: Any) -> segue.Plan:
        return segue.Plan(sites=self.sites, student=student, **settings)

    def having(self, name: str, spec: dict[str, Any] | None = None, **settings: Any) -> Family:
        """Return the same family with other settings."""
        merged = {**self.spec, **(spec or {})}
        return replace(self, name=name, spec=merged, settings={**self.settings, **settings})


def vit(**settings: Any) -> nn.Module:
    size = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": WIDTH, "num_heads": 4, "num_classes": CLASSES}
    return models.timm.create_model("vit_tiny_patch16_224", pretrained=False, **{**size, **settings})


def encoder(*, batch_first: bool = True, **settings: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=batch_first)
    return nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=batch_first, **settings)


def tokens_first() -> Batch:
    batch = models.padded_tokens()
    return replace(batch, labels=batch.labels.T, kwargs={**batch.kwargs, "src": batch.kwargs["src"].transpose(0, 1)})


def causal_tokens() -> Batch:
    batch = models.padded_tokens()
    future = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return replace(batch, kwargs={**batch.kwargs, "mask": future})


def classifier(family: str) -> Callable[..., nn.Module]:
    """Return what makes a tiny classifier of sentences of a family by the name that Hugging Face gives it."""

    def make(**settings: Any) -> nn.Module:
        sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "num_labels": CLASSES, **models._layers()}
        config = transformers.AutoConfig.for_model(family, **{**sizes, **settings})
        return transformers.AutoModelForSequenceClassification.from_config(config)

    return make


def decoder_bert(**settings: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, **models._layers()}
    return transformers.BertLMHeadModel(transformers.BertConfig(is_decoder=True, **sizes, **settings))


def language_model(family: str) -> Callable[..., nn.Module]:
    """Return what makes a tiny causal model of a family by the name that Hugging Face gives it."""

    def make(**settings: Any) -> nn.Module:
        sizes = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 64, **models._layers()}
        config = transformers.AutoConfig.for_model(family, **{**sizes, "pad_token_id": 0, **settings})
        return transformers.AutoModelForCausalLM.from_config(config)

    return make


def of(heads: int = 4, key_heads: int = 4, biases: str = "qkvo", **others: Any) -> dict[str, Any]:
    """Describe an expected spec in one line."""
    plain = {"norms": False, "rotary": False, "causal": False, "scale": 8**-0.5, "output": True, "tokens": None, "window": None}
    return {"width": WIDTH, "heads": heads, "key_heads": key_heads, "head_size": 8, "biases": biases, **plain, **others}


CALM_GPT2 = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
CALM_BERT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
LAYERS = "model.layers.*.self_attn"
DECODER = of(key_heads=2, biases="", rotary=True, causal=True, tokens=64)

TIMM = Family("timm", vit, models.images, "blocks.*.attn", of(), {"qkv_bias": True})
TORCH = Family("torch encoder", encoder, models.padded_tokens, "layers.*.self_attn", of())
TORCHVISION = Family("torchvision ViT", models.torchvision_vit, models.images, "encoder.layers.*.self_attention", of())
HF_VIT = Family(
    "HF ViT", models.hf_vit, models.named_images, "vit.layers.*.attention", of(tokens=17), CALM_BERT, hugging_face=True
)
BERT = Family(
    "HF BERT",
    classifier("bert"),
    models.sentences,
    "bert.encoder.layer.*.attention.self",
    of(biases="qkv", output=False, tokens=16),
    CALM_BERT,
    hugging_face=True,
)
GPT2 = Family(
    "HF GPT-2",
    models.gpt2,
    models.text,
    "transformer.h.*.attn",
    of(causal=True, tokens=32),
    CALM_GPT2,
    causal=True,
    hugging_face=True,
)
LLAMA = Family("HF Llama", language_model("llama"), models.text, LAYERS, DECODER, causal=True, hugging_face=True)

FAMILIES = [TIMM, TORCH, TORCHVISION, HF_VIT, BERT, GPT2, LLAMA]
CAUSAL_TORCH = replace(TORCH, name="torch encoder, causal mask", batch=causal_tokens, causal=True)

VARIANTS = [
    *FAMILIES,
    TIMM.having("timm, norms", of(norms=True), qk_norm=True),
    TIMM.having("timm, no bias", of(biases="o"), qkv_bias=False),
    replace(TORCH.having("torch encoder, tokens first", batch_first=False), batch=tokens_first),
    CAUSAL_TORCH,
    replace(BERT.having("HF RoBERTa"), make=classifier("roberta"), sites="roberta.encoder.layer.*.attention.self"),
    replace(BERT.having("HF BERT decoder", {"causal": True}), make=decoder_bert, batch=models.text, causal=True),
    GPT2.having("HF GPT-2, scaled by layer", {"scale": None}, scale_attn_by_inverse_layer_idx=True),
    GPT2.having("HF GPT-2, not scaled", {"scale": 1.0}, scale_attn_weights=False),
    LLAMA.having("HF Llama, biases", {"biases": "qkvo"}, attention_bias=True),
    replace(LLAMA.having("HF Qwen2", {"biases": "qkv"}), make=language_model("qwen2")),
    replace(LLAMA.having("HF Qwen3", {"norms": True}, head_dim=8), make=language_model("qwen3")),
    replace(LLAMA.having("HF Mistral", {"window": 16}, sliding_window=16), make=language_model("mistral")),
]


REPRESENTATIVES = [
    ("Performer", TIMM.having("timm, one layer", depth=1)),
    ("LinearAttention hedgehog", BERT.having("HF BERT, one layer", num_hidden_layers=1)),
    ("WindowedLinear", LLAMA.having("HF Llama, one layer", num_hidden_layers=1, use_cache=False)),
]


def real(batch: Batch) -> Tensor:
    """Mark the logits that count: at padding they may be anything."""
    return batch.labels != models.IGNORED


COLUMNS = [*FAMILIES[:2], CAUSAL_TORCH, *FAMILIES[2:]]


def is_refused(operator: Operator, family: Family) -> str | None:
    """Try an operator on a family; return why it is refused, or None if it ran on a padded batch with finite outputs."""
    batch, model = family.batch(), family.build()
    try:
        handover = segue.replace_(model, family.plan(operator), total_steps=2, example=batch.kwargs or batch.args)
    except SegueError as error:
        return str(error)
    with handover.as_student():
        assert batch.predict(model)[real(batch)].isfinite().all()
    return None
