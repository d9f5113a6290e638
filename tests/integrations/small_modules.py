"""Lightning modules over tiny models, and what a fresh process runs with them."""

from __future__ import annotations

from segue.integrations.lightning import HandoverCallback  # before Lightning: it lets torchvision import

# isort: split
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import segue
from segue.gates import Bernoulli, GumbelSoftmax
from segue.losses import FeatureGuidance, LogitDistillation
from segue.phases import Phase
from segue.schedules import Adaptive, Constant, Linear
from tests.helpers.tiny import SITES, Net, batch

EPOCHS, STEPS = 4, 12  # ten batches an epoch, four to a step
RESUMED = (0, 2, 3)  # in the blend, after takeover, and at the end; of phases: in the local fit, in the blend, and at the end
GUIDANCE = FeatureGuidance(schedule=Constant(alpha=1.0))
PHASES = (
    Phase(name="local fit", length=0.4, local=True, lr=2e-2, weight_decay=0.0, warmup=0.5, split=2, reuse=2),
    Phase(name="handover", length=0.5, schedule=Linear()),
    Phase(name="after", lr=1e-3, guidance=0.1, task=0.5),
)


class Module(lightning.LightningModule):
    """What a user writes; nothing here knows Segue."""

    def __init__(self, dropout: float = 0.2, *, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__()
        self.model = Net(dropout=dropout)
        self.optimizer = optimizer

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("validation", F.cross_entropy(self.model(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def loader(*, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*batch(0, 40)), batch_size=4, shuffle=shuffle)


def plan(**settings: Any) -> segue.Plan:
    return segue.Plan(**{"sites": SITES, "schedule": Linear(until=0.5), "guidance": GUIDANCE, **settings})


def trainer(folder: Path | str, *callbacks: Any, **changes: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 2}
    every = ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")
    short = {"max_epochs": EPOCHS, "accumulate_grad_batches": 4, "accelerator": "cpu"}
    return lightning.Trainer(callbacks=[*callbacks, every], default_root_dir=folder, **{**quiet, **short, **changes})


CASES = {
    "soft coins, dropout everywhere": plan(gate=GumbelSoftmax(), backbone="train"),
    "hard coins, teachers released": plan(gate=Bernoulli(), release=True, guidance=None),
    "everything trains, distilled": plan(train="all", distill=LogitDistillation()),
    "phases": segue.methods.dcr_dfg(sites=SITES, distill=LogitDistillation(), phases=PHASES),
    "adaptive": plan(schedule=Adaptive(every=2, budget=2.0, until=1.0)),
}


def fit(module: Module, callbacks: Any, folder: Path | str, data: Any = None, resume: Any = None, **changes: Any) -> Any:
    """Fit a module, and return the trainer."""
    run = trainer(folder, *callbacks, **changes)
    with warnings.catch_warnings():
        for known in ("The dirpath has changed", ".*LeafSpec.* is deprecated", "The .*dataloader.* does not have many workers"):
            warnings.filterwarnings("ignore", known)
        run.fit(module, loader() if data is None else data, loader(shuffle=False), ckpt_path=resume)
    return run


def train(case: str, folder: Path | str, resume: str | None = None) -> dict[str, Tensor]:
    """Train to the end, from the beginning or from a checkpoint, and return the weights."""
    torch.manual_seed(3 if resume is None else 4)  # a fresh process has other random states
    module = Module()
    splits = any(phase.split > 1 for phase in CASES[case].phases)  # which takes no accumulation
    changes = {"accumulate_grad_batches": 1, "limit_train_batches": 3} if splits else {}
    fit(module, [HandoverCallback(CASES[case])], folder, resume=resume, **changes)
    return module.state_dict()


def resume_all(folder: str) -> None:
    """Continue every case from every checkpoint; what a process of its own does."""
    ends = {}
    for case in CASES:
        for epoch in RESUMED:
            place = Path(folder) / case / f"epoch={epoch}.ckpt"
            ends[f"{case}, {epoch}"] = train(case, Path(folder) / f"{case} {epoch}", str(place))
    torch.save(ends, Path(folder) / "ends.pt")
