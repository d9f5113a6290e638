"""Replace attention by an operator of your own: a student is any function (teacher, site) -> module.

Run: python examples/custom_student.py --steps 300
"""

import argparse

import torch
from small_vit import Attention, accuracy, batches, digits, pretrained
from torch import nn
from torch.nn import functional as F

import segue


class LowRankMixer(nn.Module):
    """Gather the tokens into a few slots by learned weights, and spread the slots over the tokens again."""

    def __init__(self, width: int, tokens: int, rank: int) -> None:
        super().__init__()
        self.gather = nn.Parameter(torch.randn(rank, tokens) / tokens)
        self.spread = nn.Parameter(torch.randn(tokens, rank) / rank**0.5)
        self.value, self.proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):  # (batch, tokens, width): called as its teacher is called, returns what its teacher returns
        slots = torch.einsum("rt,btw->brw", self.gather, self.value(x))
        return self.proj(torch.einsum("tr,brw->btw", self.spread, slots))


def mixer(teacher: nn.Module, site: segue.Site) -> nn.Module:
    """Read the width from the teacher; earlier sites get fewer slots."""
    return LowRankMixer(teacher.width, tokens=16, rank=4 + site.depth)


def main(steps: int) -> None:
    training, test = digits()
    model = pretrained(training)
    print(f"accuracy before {accuracy(model, *test):.3f}")

    plan = segue.methods.dcr_dfg(sites=Attention, student=mixer)
    handover = segue.replace_(model.train(), plan, total_steps=steps, example=test[0][:2])
    optimizer = torch.optim.AdamW(handover.parameters(), lr=3e-3)
    print(handover.verify(test[0][:8], optimizer=optimizer))
    for images, labels in batches(*training, steps, seed=2):
        loss = F.cross_entropy(model(images), labels) + handover.aux_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        handover.step()
    for name, measured in handover.similarity(test[0]).items():
        print(f"{name}: cosine to its teacher {measured.cosine:.2f}")
    handover.finalize_()
    print(f"accuracy with the mixer {accuracy(model, *test):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
