"""Give a trained ViT new attention by a handover. `diff examples/vit_torch.py examples/vit_segue.py` is the lesson.

Run: python examples/vit_segue.py --steps 300
"""

import argparse

import torch
from small_vit import accuracy, batches, digits, pretrained
from torch.nn import functional as F

import segue


def main(steps: int) -> None:
    training, test = digits()
    model = pretrained(training, steps)
    print(f"accuracy before {accuracy(model, *test):.3f}")

    plan = segue.methods.dcr_dfg(sites="blocks.*.attn")
    handover = segue.replace_(model.train(), plan, total_steps=steps)
    optimizer = torch.optim.AdamW(handover.parameters(), lr=3e-3)

    for images, labels in batches(*training, steps, seed=2):
        loss = F.cross_entropy(model(images), labels) + handover.aux_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        handover.step()
    handover.finalize_()

    print(f"accuracy with new attention {accuracy(model, *test):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
