"""A Lightning module over the tiny model."""

from __future__ import annotations

from segue.integrations.lightning import HandoverCallback  # noqa: F401 - before Lightning: it lets torchvision import

# isort: split
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from .cases import Net, batch


class Module(lightning.LightningModule):
    """What a user writes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Net()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class SaveAt(lightning.Callback):
    """Write one checkpoint at the end of an epoch."""

    def __init__(self, epoch: int, path: Path) -> None:
        self.epoch, self.path = epoch, path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*batch(0, 16)), batch_size=4)


def trainer(*callbacks: Any, save_at: tuple[int, Path] | None = None) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    saving = [] if save_at is None else [SaveAt(*save_at)]
    return lightning.Trainer(callbacks=[*callbacks, *saving], max_epochs=4, accelerator="cpu", **quiet)
