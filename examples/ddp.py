"""Hand over in several processes: replace first, then wrap. Every process sees its part of each batch.

Run: torchrun --nproc_per_node 2 examples/ddp.py --steps 300
One process works too: python examples/ddp.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from small_vit import accuracy, batches, digits, pretrained
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import segue


def main(steps: int) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    training, test = digits()
    model = pretrained(training, steps=300)  # the same in every process

    plan = segue.methods.gumbel_dfg(sites="blocks.*.attn")  # the coins depend on seed, step and site, so all ranks draw alike
    handover = segue.replace_(model.train(), plan, total_steps=steps)
    network = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.AdamW(handover.parameters(), lr=3e-3)

    for images, labels in batches(*training, steps, seed=2):
        mine = slice(rank, None, world)
        loss = F.cross_entropy(network(images[mine]), labels[mine]) + handover.aux_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        handover.step()
    handover.finalize_()

    if rank == 0:
        print(f"accuracy with new attention {accuracy(model, *test):.3f}, trained by {world} process{'es' * (world > 1)}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
