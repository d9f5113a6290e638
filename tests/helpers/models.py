"""Tiny models of every family, with random weights, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from segue.sites import Selector

CLASSES = 5
WIDTH = 32
VOCABULARY = 50
TOKENS = 7
IGNORED = -100  # what cross_entropy takes for "no label"


@dataclass(frozen=True)
class Batch:
    """How a model is called, and what its logits should be."""

    labels: Tensor
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    mask: Tensor | None = None  # 1 where a token counts

    def logits(self, model: nn.Module) -> Tensor:
        output = model(*self.args, **self.kwargs)
        return getattr(output, "logits", output)

    def loss(self, model: nn.Module) -> Tensor:
        return F.cross_entropy(self.logits(model).flatten(0, -2), self.labels.flatten())

    @torch.no_grad()
    def predict(self, model: nn.Module) -> Tensor:
        return self.logits(model.eval())


@dataclass(frozen=True)
class Case:
    """A model, a batch for it, and the sites to replace."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    sites: Selector
    count: int
    teacher_gradient: bool = False

    def build(self, seed: int = 0) -> nn.Module:
        return build(self.make, seed)


def build(make: Callable[..., nn.Module], seed: int = 0, **settings: Any) -> nn.Module:
    """Make a model whose weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make(**settings)
        scramble_(model)
    return model


@torch.no_grad()
def scramble_(model: nn.Module) -> None:
    """Leave no tensor at its initial constant: zero heads and fresh norms would hide mistakes."""
    for parameter in model.parameters():
        fan_in = parameter[0].numel() if parameter.dim() > 1 else 100
        parameter.add_(torch.randn_like(parameter), alpha=fan_in**-0.5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)


def images() -> Batch:
    return Batch(torch.arange(4), (_pixels(),))


def named_images() -> Batch:
    return Batch(torch.arange(4), kwargs={"pixel_values": _pixels()})


def _pixels() -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def rows() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch(torch.arange(8) % CLASSES, (torch.randn(8, 6, generator=generator),))


def padding() -> Tensor:
    """Mark 7, 5 and 3 tokens as real."""
    return (torch.arange(TOKENS) < torch.tensor([[7], [5], [3]])).long()


def token_ids() -> Tensor:
    return torch.randint(VOCABULARY, (3, TOKENS), generator=torch.Generator().manual_seed(0))


def sentences() -> Batch:
    mask = padding()
    return Batch(torch.arange(3), kwargs={"input_ids": token_ids(), "attention_mask": mask}, mask=mask)


def text() -> Batch:
    ids, mask = token_ids(), padding()
    labels = torch.where(mask.bool(), ids.roll(-1, dims=1), IGNORED)
    return Batch(labels, kwargs={"input_ids": ids, "attention_mask": mask}, mask=mask)


def padded_tokens() -> Batch:
    mask = padding()
    labels = torch.where(mask.bool(), torch.arange(TOKENS), IGNORED)
    features = torch.randn(3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    return Batch(labels, kwargs={"src": features, "src_key_padding_mask": mask == 0}, mask=mask)


def timm_vit(name: str, heads: int, depth: int) -> Callable[[], nn.Module]:
    size = {"img_size": 32, "patch_size": 8, "depth": depth, "embed_dim": 16 * heads, "num_heads": heads}
    return lambda: timm.create_model(name, pretrained=False, num_classes=CLASSES, **size)


def timm_cnn() -> nn.Module:
    return timm.create_model("resnet18", pretrained=False, num_classes=CLASSES, channels=(16, 16, 32, 32))


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=WIDTH, mlp_dim=64, num_classes=CLASSES
    )


def torch_encoder(*, dropout: float = 0.1, **settings: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=64, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2, **settings)


def hf_vit(**settings: Any) -> nn.Module:
    sizes = {"image_size": 32, "patch_size": 8, "num_labels": CLASSES, **_layers()}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **settings))


def bert(**settings: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "num_labels": CLASSES, **_layers()}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **settings))


def gpt2(**settings: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=WIDTH, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1, **settings
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**settings: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, **_layers()}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | settings))


def _layers() -> dict[str, int]:
    return {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES))


class SharedLayers(nn.Module):
    """One layer under three names, called at every depth."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())
        self.embed = nn.Linear(6, 16)
        self.layers = nn.ModuleList([layer] * 3)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


CASES = [
    Case("timm vit_tiny", timm_vit("vit_tiny_patch16_224", 3, depth=3), images, "blocks.*.attn", 3),
    Case("timm vit_small", timm_vit("vit_small_patch16_224", 6, depth=2), images, "blocks.*.attn", 2),
    Case("timm deit_tiny", timm_vit("deit_tiny_patch16_224", 3, depth=2), images, "blocks.*.attn", 2),
    Case("timm deit_tiny_distilled", timm_vit("deit_tiny_distilled_patch16_224", 3, depth=2), images, "blocks.*.attn", 2),
    Case("timm resnet18", timm_cnn, images, "layer{2,3}.*", 4, teacher_gradient=True),
    Case("torchvision ViT", torchvision_vit, images, nn.MultiheadAttention, 2),
    Case("torch encoder", torch_encoder, padded_tokens, "layers.*.self_attn", 2),
    Case("HF ViT", hf_vit, named_images, "vit.layers.*.attention", 2),
    Case("HF BERT", bert, sentences, "bert.encoder.layer.*.attention.self", 2),
    Case("HF BERT layers", bert, sentences, "bert.encoder.layer.*", 2, teacher_gradient=True),
    Case("HF BERT encoder", bert, sentences, "bert.encoder", 1),
    Case("HF GPT-2", gpt2, text, "transformer.h.*.attn", 2),
    Case("HF GPT-2 body", lambda: gpt2(tie_word_embeddings=False), text, "transformer", 1),
    Case("HF Llama", llama, text, "model.layers.*.self_attn", 2),
    Case("HF Llama layers", llama, text, "model.layers.*", 2, teacher_gradient=True),
    Case("MLP", mlp, rows, "{0,2}", 2),
    Case("shared layers", SharedLayers, rows, "layers.*", 1),
]
