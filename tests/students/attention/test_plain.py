"""Attention of people's own repositories is read without being registered, or by a few lines that suffice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import segue
from segue.errors import SegueWarning, StudentError
from segue.sites import Site
from segue.students import AttentionCall, AttentionSpec, ByName, LinearAttention, SlidingWindow, Softmax
from segue.students.attention import interfaces
from tests.helpers import models
from tests.students.attention import plain

HERE, TOKENS = Site("here"), 7
READ = {
    "nanoGPT": (plain.NanoAttention(), ()),
    "nanoGPT, slow": (plain.NanoAttention(flash=False), ()),
    "minGPT": (plain.MiniAttention(), ()),
    "vit-pytorch": (plain.NormedAttention(), ()),
    "vit-pytorch, no output": (plain.NormedAttention(project=False), ()),
    "torchtitan": (plain.ComplexRotation(), (plain.angles(TOKENS),)),
}
CAUSAL = ("nanoGPT", "nanoGPT, slow", "minGPT", "torchtitan")


@pytest.fixture(autouse=True)
def nothing_stays_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "_REGISTERED", {})


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def inputs() -> Tensor:
    return torch.randn(2, TOKENS, plain.WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", READ)
def test_it_is_read_without_being_registered(name: str) -> None:
    teacher, others = READ[name]
    models.scramble_(teacher)
    x = inputs()
    assert close(Softmax()(teacher, HERE)(x, *others), teacher(x, *others))
    for operator in (LinearAttention(), SlidingWindow(window=3)):
        student = operator(teacher, HERE)
        y = student(x, *others)
        y.sum().backward()
        assert y.isfinite().all()
        assert all(p.grad is not None for p in student.parameters())
        later = x.clone()
        later[:, -1] += 1
        assert torch.equal(student(later, *others)[:, :-1], y[:, :-1]) == (name in CAUSAL)


def test_a_rotation_inside_is_registered_in_ten_lines() -> None:
    class Mine(ByName):
        def __init__(self, module: nn.Module, **reading: object) -> None:
            super().__init__(module, **reading)
            self.rope = module.pos_embeddings

        def unpack(self, x: Tensor, y: None = None, *, mask: Tensor | None = None, input_pos: Tensor | None = None):
            return AttentionCall(x, mask=None if mask is None else mask[:, None], rotary=self.rope)

        def rotate(self, q: Tensor, k: Tensor, rotary: nn.Module) -> tuple[Tensor, ...]:
            return tuple(rotary(part.transpose(1, 2)).transpose(1, 2) for part in (q, k))

    teacher, x = plain.RotaryInside(), inputs()
    models.scramble_(teacher)
    with pytest.raises(StudentError, match="off by"):
        Softmax()(teacher, HERE)
    segue.students.register_attention(plain.RotaryInside, Mine)
    assert close(Softmax()(teacher, HERE)(x), teacher(x))
    mask = torch.ones(2, TOKENS, TOKENS, dtype=torch.bool).tril()
    mask[1, :, :2] = False
    mask[1, :2, :2] = True  # rows of padding see something, or they are NaN
    assert close(Softmax()(teacher, HERE)(x, mask=mask)[:, 2:], teacher(x, mask=mask)[:, 2:])


def test_a_position_bias_is_registered_in_four_lines() -> None:
    class Mine(ByName):
        def parse(self, module: nn.Module) -> AttentionSpec:
            return replace(super().parse(module), biased=True)

        def unpack(self, x: Tensor) -> AttentionCall:
            return AttentionCall(x, bias=plain.slopes(x.shape[1], x.shape[1]))

    teacher, x = plain.Alibi(), inputs()
    with pytest.raises(StudentError, match="if the fields of segue.students.AttentionSpec can say what it computes"):
        Softmax()(teacher, HERE)
    segue.students.register_attention(plain.Alibi, Mine)
    for operator in (Softmax(), SlidingWindow(window=TOKENS, sinks=0)):
        assert close(operator(teacher, HERE)(x), teacher(x))
    with pytest.raises(StudentError) as caught:
        LinearAttention()(teacher, HERE)
    assert str(caught.value) == (
        "LinearAttention cannot honour the position bias of site 'here'.\n"
        "  Its weights are not a softmax of logits, which they change.\n"
        "  Hint: SlidingWindow keeps them; LinearAttention(ignore=('bias',)) leaves them out. Nothing was changed."
    )
    with pytest.warns(SegueWarning, match="LinearAttention leaves the position bias of its teacher out"):
        assert LinearAttention(ignore=("bias",))(teacher, HERE)(x).isfinite().all()


def test_weights_that_an_interface_keeps_for_itself_are_noticed() -> None:
    """A student would be another one after a reload."""

    class Mine(ByName):
        def __init__(self, module: nn.Module, **reading: object) -> None:
            super().__init__(module, **reading)
            self.norm = module.norm

        def parse(self, module: nn.Module) -> AttentionSpec:
            return replace(super().parse(module), input_norm=None)

        def unpack(self, x: Tensor) -> AttentionCall:
            return AttentionCall(self.norm(x))

        def ignored(self, module: nn.Module) -> list[nn.Module]:
            return [module.norm]

    segue.students.register_attention(plain.NormedAttention, Mine)
    with pytest.raises(StudentError, match="A saved student is another one when it is loaded"):
        Softmax()(plain.NormedAttention(), HERE)


def test_a_part_that_is_left_out_is_noticed() -> None:
    class Mine(ByName):
        def parse(self, module: nn.Module) -> AttentionSpec:
            return replace(super().parse(module), input_norm=None)

        def ignored(self, module: nn.Module) -> list[nn.Module]:
            return [module.norm]

    segue.students.register_attention(plain.NormedAttention, Mine)
    teacher = plain.NormedAttention()
    models.scramble_(teacher)
    with pytest.raises(StudentError, match="Softmax attention with its weights returns another result"):
        Softmax()(teacher, HERE)


@pytest.mark.parametrize("name", READ)
def test_weights_of_zero_do_not_hide_how_a_module_is_read(name: str) -> None:
    """An output projection of zeros, as adapters and diffusion models begin with, makes any reading look right."""
    teacher, others = READ[name]
    models.scramble_(teacher)
    saved = {key: value.clone() for key, value in teacher.state_dict().items()}
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.zero_()
    student = Softmax()(teacher, HERE)
    teacher.load_state_dict(saved)
    x = inputs()
    right = Softmax()(teacher, HERE)
    assert vars(student.interface)["reading"] == vars(right.interface)["reading"]
    student.load_state_dict(right.state_dict())
    assert close(student(x, *others), teacher(x, *others))


class Future(plain.Alibi):
    """ALiBi whose penalties hide the future by minus infinity."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (plain.HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=hiding(x.shape[1]))
        return self.proj(y.transpose(1, 2).flatten(2))


def hiding(tokens: int) -> Tensor:
    return plain.slopes(tokens, tokens).masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_an_ignored_bias_hides_stays_hidden(compiled: bool) -> None:
    class Mine(ByName):
        def parse(self, module: nn.Module) -> AttentionSpec:
            return replace(super().parse(module), biased=True)

        def unpack(self, x: Tensor) -> AttentionCall:
            return AttentionCall(x, bias=hiding(x.shape[1]))

    segue.students.register_attention(Future, Mine)
    with pytest.warns(SegueWarning, match="leaves the position bias"):
        student = LinearAttention(ignore=("bias",))(Future(), HERE)
    x = inputs()
    later = x.clone()
    later[:, -1] += 1
    if compiled:
        with pytest.raises(RuntimeError, match="ignores a bias that hides tokens: give it as a mask"), torch.no_grad():
            torch.compile(student, backend="eager")(x)
    else:
        assert torch.equal(student(later)[:, :-1], student(x)[:, :-1])


class ManyArguments(plain.NanoAttention):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().forward(x)


class Called(nn.Module):
    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attn(x, x, x)
        return y


@pytest.mark.parametrize("heads", [4, 2])
def test_an_interface_that_cannot_be_called_alone_is_proved_by_the_first_call(heads: int) -> None:
    class Mine(segue.students.AttentionInterface):
        def parse(self, module: nn.Module) -> AttentionSpec:
            q, k, v = segue.students.split_qkv(segue.students.projection(module.c_attn))
            output = segue.students.projection(module.c_proj)
            return AttentionSpec(heads=heads, head_size=32 // heads, query=q, key=k, value=v, output=output, causal=True)

        def unpack(self, x: Tensor, cos: Tensor, sin: Tensor) -> AttentionCall:
            return AttentionCall(x)

    segue.students.register_attention(ManyArguments, Mine)
    model = Called(ManyArguments())
    models.scramble_(model)
    segue.replace_(model, segue.Plan(sites="attn", student=LinearAttention()), total_steps=2)
    if heads == 4:
        assert model(inputs()).isfinite().all()
    else:
        with pytest.raises(StudentError, match="does not read the attention at site 'attn'"):
            model(inputs())


def test_a_registered_reading_that_is_not_the_first_is_the_same_after_a_reload() -> None:
    """nanoGPT's module is causal inside, which names leave open: the second way to read it is the right one."""

    class Mine(ByName):
        pass

    segue.students.register_attention(plain.NanoAttention, Mine)
    teacher, x = plain.NanoAttention(), inputs()
    models.scramble_(teacher)
    assert close(Softmax()(teacher, HERE)(x), teacher(x))
