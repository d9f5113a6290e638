"""Give a trained ViT new attention inside Lightning's Trainer: one callback.

Run: python examples/lightning.py --steps 300
Stopped in the middle? The same command with --resume continues from Lightning's last checkpoint, bit for bit.
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.append(sys.path.pop(0))  # this file has the package's name: search this folder last

import segue
from segue.integrations.lightning import HandoverCallback  # first: it lets torchvision import where torch has no CUDA

# isort: split
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small_vit import accuracy, digits, pretrained
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    """What you have anyway; nothing here knows Segue."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=3e-3)


def main(steps: int, folder: Path, resume: bool) -> None:
    training, test = digits()
    module = Classifier(pretrained(training))
    print(f"accuracy before {accuracy(module.model, *test):.3f}")

    plan = segue.methods.dcr_dfg(sites="blocks.*.attn")
    loader = DataLoader(TensorDataset(*training), batch_size=64, shuffle=True, drop_last=True)
    epochs = math.ceil(steps / len(loader))
    saving = ModelCheckpoint(folder, filename="{epoch}", save_last="link", save_top_k=-1)
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "default_root_dir": folder}
    trainer = lightning.Trainer(max_epochs=epochs, callbacks=[HandoverCallback(plan), saving], **quiet)
    trainer.fit(module, loader, ckpt_path="last" if resume else None)

    print(f"accuracy with new attention {accuracy(module.model, *test):.3f}")
    torch.save(module.model.state_dict(), folder / "student.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--resume", action="store_true")
    main(**vars(parser.parse_args()))
