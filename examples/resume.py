"""Stop a handover in the middle, resume it from its checkpoint, and get the same result, bit for bit.

Run: python examples/resume.py --steps 40
"""

import argparse
import tempfile

import torch
from small_vit import batches, digits, pretrained
from torch.nn import functional as F

import segue


def train(model, handover, optimizer, data, steps: int) -> list[float]:
    """Train from the handover's current step; the data depends on the step alone, so it needs no state."""
    losses = []
    for images, labels in list(batches(*data, handover.total_steps, seed=2))[handover.steps_done :][:steps]:
        loss = F.cross_entropy(model(images), labels) + handover.aux_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        handover.step()
        losses.append(loss.item())
    return losses


def main(steps: int) -> None:
    training, _ = digits()
    plan = segue.methods.gumbel_dfg(sites="blocks.*.attn")  # a random gate: its noise must come back too
    stop = steps // 5 // 2 + 1  # in the middle of the anneal

    model = pretrained(training).train()
    handover = segue.replace_(model, plan, total_steps=steps)
    optimizer = torch.optim.AdamW(handover.parameters(), lr=1e-3)
    uninterrupted = train(model, handover, optimizer, training, steps)

    with tempfile.TemporaryDirectory() as folder:
        stopped = pretrained(training).train()
        handover = segue.replace_(stopped, plan, total_steps=steps)
        optimizer = torch.optim.AdamW(handover.parameters(), lr=1e-3)
        first = train(stopped, handover, optimizer, training, stop)
        segue.save(handover, folder, optimizer=optimizer)
        print(f"stopped at {handover}")

        resumed = pretrained(training).train()  # in your program: a new process loads the pretrained model again
        handover = segue.load_(resumed, folder)
        optimizer = torch.optim.AdamW(handover.parameters(), lr=1e-3)
        segue.load_(handover, folder, optimizer=optimizer)
        print(f"resumed at {handover}")
        second = train(resumed, handover, optimizer, training, steps - stop)

    assert first + second == uninterrupted
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), resumed.state_dict().values(), strict=True))
    print(f"{len(uninterrupted)} losses and {len(model.state_dict())} tensors are the same, bit for bit")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args().steps)
