"""Tiny models for the tests of the core."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import segue

SITES = "blocks.*.attn"
needs_inductor = pytest.mark.skipif(" " in torch.__file__, reason="torch's inductor does not link from a path with a space")


class Attention(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.drop(self.proj(F.scaled_dot_product_attention(q, k, v)))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(width, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Net(nn.Module):
    """Three pre-norm residual blocks over (batch, tokens, 8), three classes."""

    def __init__(self, depth: int = 3, width: int = 8, dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
            self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def batch(seed: int = 0, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 5, 8, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def start(plan: segue.Plan | None = None, total_steps: int | None = 10, **net: object) -> segue.Handover:
    model = Net(**net).train()  # type: ignore[arg-type]
    return segue.replace_(model, plan or segue.Plan(sites=SITES), total_steps=total_steps)


def optimizer_for(handover: segue.Handover) -> torch.optim.Optimizer:
    return torch.optim.AdamW(handover.parameters(), lr=1e-2)


def train(handover: segue.Handover, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Run the loop that users write; the batch depends on the step, so a resumed run sees what an undisturbed one sees."""
    losses = []
    for _ in range(steps):
        x, y = batch(handover.steps_done)
        loss = F.cross_entropy(handover.model(x), y) + handover.aux_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        handover.step()
        losses.append(loss.item())
    return losses


def constant(alpha: float) -> segue.schedules.Constant:
    return segue.schedules.Constant(alpha=alpha)


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(x.detach().reshape(-1).contiguous().view(torch.uint8) for x in (a, b)))


def same_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(same_bits(a[name], b[name]) for name in a)
