"""The model and the data of the examples: a small ViT and scikit-learn's digits. Nothing here knows Segue."""

import functools

import torch
from scipy import stats
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)  # the model is too small to share between cores


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):  # (batch, tokens, width)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (batch, heads, tokens, features)
        return self.proj(self.mix(q, k, v).transpose(1, 2).flatten(2))

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class LinearAttention(Attention):
    def mix(self, q, k, v):  # never a matrix of tokens by tokens
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return q @ (k.mT @ v) / (q @ k.sum(2, keepdim=True).mT)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, width: int = 48, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.positions = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images):  # (batch, 1, 8, 8)
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions  # (batch, 16, width)
        return self.head(self.norm(self.blocks(tokens)).mean(1))


@functools.cache
def digits():
    """Return (images, labels) to train on, and 500 more to test on."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    images, test_images, labels, test_labels = train_test_split(images, labels, test_size=500, random_state=0)
    return (images, labels), (test_images, test_labels)


def few(images, labels, count: int, seed: int):
    """Draw a few of the images: all that a replacement gets to see."""
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:count]
    return images[chosen], labels[chosen]


def batches(images, labels, steps: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(images), (64,), generator=generator)
        yield images[chosen], labels[chosen]


@functools.cache
def _weights(images, labels, steps: int):
    torch.manual_seed(0)
    model = ViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for some, theirs in batches(images, labels, steps, seed=1):
        F.cross_entropy(model(some + 0.1 * torch.randn_like(some)), theirs).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.state_dict()


def pretrained(data, steps: int = 1000) -> ViT:
    """Return a copy of the teacher; the first call trains it, in about 20 seconds, to 98.6 % of the test images."""
    model = ViT()
    model.load_state_dict(_weights(*data, steps))
    return model


def accuracy(model: nn.Module, images, labels) -> float:
    with torch.no_grad():
        return (model.eval()(images).argmax(-1) == labels).float().mean().item()


def interval(values: list[float]) -> str:
    """Say the mean and its 95 % interval (Student's t)."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.3f} (1 seed)"
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{mean:.3f} ± {half:.3f} ({len(values)} seeds)"
