"""The models, data and plans behind the files of earlier versions. Nothing here may change: the files hold their hashes.

Weights are drawn in float64, so that the end of a resumed training is the same on every processor to many digits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import segue
from segue.gates import GumbelSoftmax
from segue.losses import CosineGuidance, FeatureGuidance, LogitDistillation
from segue.schedules import Linear
from segue.students import OneLayer

SITES = "blocks.*.attn"
TOTAL, STOP = 9, 4  # steps of a training, and where it was stopped
LLAMA_SITES = "model.layers.*.self_attn"
BERT_SITES = "bert.encoder.layer.*.attention.self"


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1)
        return self.drop(self.proj(scores @ v))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Net(nn.Module):
    """Four pre-norm residual blocks over (batch, tokens, 6), three classes."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Block(6) for _ in range(4))
            self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def batch(seed: int, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 5, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (size,), generator=generator)


def own_student(teacher: nn.Module, site: segue.Site) -> nn.Module:
    """A user's own student, which a plan cannot save by name."""
    return nn.Linear(6, 6).double()


class OwnSchedule:
    """A user's own schedule that adapts: its state is in the checkpoint."""

    def __init__(self) -> None:
        self.seen = 0.0

    def __call__(self, progress: float, site: segue.Site) -> float:
        return max(0.0, 1.0 - progress - 0.01 * self.seen)

    def observe(self, progress: float, similarity: dict[str, Any]) -> None:
        self.seen += 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


SLOW = Linear(until=0.8)
GUIDED = segue.methods.dcr_dfg(sites=SITES, schedule=SLOW, gate=GumbelSoftmax(temperature=0.5), seed=3)
EVERYTHING = segue.Plan(
    sites=SITES, schedule=SLOW, guidance=CosineGuidance(), distill=LogitDistillation(), train="all", backbone="train", seed=1
)
FITS = {"guided": GUIDED, "everything": EVERYTHING, "plain": None}  # the last trains without a plan
SPAN = segue.Plan(sites=segue.Span("blocks", every=2), student=OneLayer(), schedule=segue.schedules.Constant(alpha=0.0))


def own_plan() -> segue.Plan:
    return segue.Plan(sites=SITES, student=own_student, schedule=OwnSchedule(), guidance=FeatureGuidance(weight=0.5))


def optimizer_for(handover: segue.Handover) -> torch.optim.Optimizer:
    return torch.optim.AdamW(handover.parameters(), lr=1e-2)


def train(handover: segue.Handover, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Run the loop that users write."""
    for _ in range(steps):
        x, y = batch(handover.steps_done)
        loss = F.cross_entropy(handover.model(x), y) + handover.aux_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        handover.step()


class Batches:
    """Batches that depend on their place alone."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        return iter([batch(index) for index in range(6)])


def fit(name: str, folder: Path, **more: Any) -> Any:
    """Train a case by segue.fit, or go on with it."""
    return segue.fit(
        Net(),
        FITS[name],
        Batches(),
        segue.Classification(label_smoothing=0.1),
        recipe=segue.Recipe(steps=TOTAL, lr=1e-2, warmup=0.2, seed=4),
        validation=[batch(50, 5), batch(51, 3)],
        folder=folder,
        resume=True,
        progress=None,
        **more,
    )


def filled(folder: Path, out: Path, **places: Path) -> Path:
    """Copy a folder of an earlier version, with paths of this machine in the place of {names}."""
    shutil.copytree(folder, out)
    for path in out.rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        for name, place in places.items():
            text = text.replace(f'"{{{name}}}"', json.dumps(str(place)))
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
    return out


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of eight tokens for Hugging Face's Trainer."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(1, 20, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "attention_mask": torch.ones(8, dtype=torch.long), "labels": ids.sum() % 3}


TRAINER_STEPS, TRAINER_STOP = 10, 4


def trainer(folder: Path, callback: Any, **changes: Any) -> Any:
    """Return a stock Trainer over a tiny BERT."""
    import transformers

    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 20}
    config = transformers.BertConfig(**sizes, max_position_embeddings=8, initializer_range=0.2, num_labels=3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(config)
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=TRAINER_STEPS, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_strategy="no", seed=3, **{"save_strategy": "no", **changes},
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=Rows(), callbacks=[callback])


TRAINER_PLAN = segue.methods.dcr_dfg(sites=BERT_SITES, schedule=Linear(until=0.6))
