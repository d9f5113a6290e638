"""Give a trained ViT new attention by hand. `diff examples/vit_torch.py examples/vit_segue.py` is the lesson.

Run: python examples/vit_torch.py --steps 300
"""

import argparse

import torch
from small_vit import Attention, accuracy, batches, digits, pretrained
from torch.nn import functional as F


def main(steps: int) -> None:
    training, test = digits()
    model = pretrained(training, steps)
    print(f"accuracy before {accuracy(model, *test):.3f}")

    model.train().requires_grad_(False)
    for block in model.blocks:
        block.attn = Attention(width=48, heads=4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)

    for images, labels in batches(*training, steps, seed=2):
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    print(f"accuracy with new attention {accuracy(model, *test):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
