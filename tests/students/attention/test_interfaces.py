"""The registry: an interface of your own, which one wins, and what an unknown module is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import segue
from segue.errors import StudentError
from segue.sites import Site, select
from segue.students import LinearAttention, Softmax
from segue.students.attention import interfaces as interfaces
from segue.students.attention.families import ByName
from segue.students.attention.interfaces import interface_of
from tests.students.cases import BERT, LLAMA, TIMM, TORCHVISION, Family

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
HERE = Site("here")
KEPT = torch.arange(6) < torch.tensor([[6], [4]])  # (batch, tokens)


def attention(family: Family, layer: int = 0) -> nn.Module:
    model = family.build()
    return model.get_submodule(select(model, family.sites)[layer].name)


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


class Unusual(nn.Module):
    """Attention of a user's own, whose parts have the names that the example shows; nobody knows the name of its input."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.head_size = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, words: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(words).chunk(3, -1))
        seen = None if mask is None else mask[:, None, None, :]
        return self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2))


class MoreUnusual(Unusual):
    pass


@pytest.fixture(autouse=True)
def nothing_stays_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "_REGISTERED", {})


def example() -> str:
    """Return the code that the error shows for a module that nobody knows."""
    model = nn.Sequential(Unusual())
    before = list(model.modules())
    with pytest.raises(StudentError) as caught:
        segue.replace_(model, segue.Plan(sites="0", student=LinearAttention()))
    assert list(model.modules()) == before
    asked, found, hint, code = str(caught.value).split("\n", 3)
    assert asked == "Segue cannot read the module at site '0' as attention."
    assert found == "  It is Unusual (qkv: Linear, proj: Linear). No interface matches it."
    assert hint == "  Hint: register an interface, then try again (nothing was changed):"
    return "\n".join(line.removeprefix("    ") for line in code.splitlines())


@pytest.mark.parametrize("kind", [Unusual, MoreUnusual])
def test_the_example_of_the_error_works(kind: type[nn.Module]) -> None:
    exec(example(), {"segue": segue, "Unusual": Unusual})
    torch.manual_seed(0)
    model, x = nn.Sequential(kind()), torch.randn(2, 6, 32)
    teacher = model[0]
    expected, masked = teacher(x), teacher(x, KEPT)
    handover = segue.replace_(model, segue.Plan(sites="0", student=Softmax()), total_steps=2, example=x)
    with handover.as_student():
        assert close(model(x), expected)
        assert close(handover.seams["0"].student(x, KEPT)[KEPT], masked[KEPT])
    linear = segue.replace_(nn.Sequential(kind()), segue.Plan(sites="0", student=LinearAttention()), total_steps=2)
    linear.model(x).sum().backward()
    assert all(p.grad is not None for p in linear.parameters())


def test_what_is_registered_last_wins() -> None:
    def reader(tokens: int) -> type[segue.students.AttentionInterface]:
        class Mine(segue.students.AttentionInterface):
            def parse(self, module: nn.Module) -> segue.students.AttentionSpec:
                q, k, v = segue.students.split_qkv(segue.students.projection(module.qkv))
                output = segue.students.projection(module.proj)
                return segue.students.AttentionSpec(heads=4, head_size=8, query=q, key=k, value=v, output=output, tokens=tokens)

            def unpack(self, x: Tensor, mask: Tensor | None = None) -> segue.students.AttentionCall:
                return segue.students.AttentionCall(x, token_mask=mask)

        return Mine

    segue.students.register_attention(Unusual, reader(2))
    assert interface_of(Unusual(), HERE)[1].tokens == 2
    segue.students.register_attention(Unusual, reader(8))
    assert interface_of(Unusual(), HERE)[1].tokens == 8
    assert interface_of(MoreUnusual(), HERE)[1].tokens == 8
    segue.students.register_attention(MoreUnusual, reader(4))
    assert interface_of(MoreUnusual(), HERE)[1].tokens == 4
    segue.students.register_attention(Unusual, reader(2))
    assert interface_of(MoreUnusual(), HERE)[1].tokens == 4, "the nearest kind counts, whenever it was registered"


def test_a_registered_kind_wins_over_what_segue_knows() -> None:
    class Mine(ByName):
        def parse(self, module: nn.Module) -> segue.students.AttentionSpec:
            return replace(super().parse(module), tokens=77)

    segue.students.register_attention(timm.layers.Attention, Mine)
    assert interface_of(attention(TIMM), HERE)[1].tokens == 77


def test_an_interface_that_reads_wrongly_is_refused() -> None:
    class Mine(ByName):
        def parse(self, module: nn.Module) -> segue.students.AttentionSpec:
            return replace(super().parse(module), scale=1.0)

    segue.students.register_attention(timm.layers.Attention, Mine)
    with pytest.raises(StudentError, match="Softmax attention with its weights returns another result"):
        interface_of(attention(TIMM), HERE)


@pytest.mark.parametrize(
    ("family", "sites", "inner"),
    [
        (BERT, "bert.encoder.layer.*.attention", "bert.encoder.layer.0.attention.self"),
        (TIMM, "blocks.*", "blocks.0.attn"),
        (LLAMA, "model.layers.*", "model.layers.0.self_attn"),
        (TORCHVISION, "encoder.layers.*", "encoder.layers.encoder_layer_0.self_attention"),
    ],
    ids=["BERT's attention", "timm's block", "Llama's layer", "torchvision's block"],
)
def test_a_container_is_told_what_is_inside(family: Family, sites: str, inner: str) -> None:
    with pytest.raises(StudentError) as caught:
        segue.replace_(family.build(), segue.Plan(sites=sites, student=LinearAttention()))
    assert str(caught.value).endswith(f"Hint: choose the attention inside it: {inner!r}. Nothing was changed.")
