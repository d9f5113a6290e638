"""Give a pretrained timm ViT linear attention. Bring a folder of images; they need no labels.

Run: python examples/timm_vit.py --images FOLDER --steps 1000
Takes: without options, as a trial, 10 steps of 4 images: about 15 seconds on one core.
Prints: where the weights and the images come from, and a loss per step. Ten steps show that it runs and no more.
"""

import argparse
import os
import urllib.request
from pathlib import Path

import PIL.Image
import torch
from sklearn.datasets import load_sample_images
from torch.nn import functional as F

import segue  # before timm: it lets timm import where torch has no CUDA


def pretrained(name: str) -> torch.nn.Module:
    try:
        urllib.request.urlopen("https://huggingface.co", timeout=3).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"  # before timm imports the hub's client: only its cache, no retries
    import timm

    try:
        model = timm.create_model(name, pretrained=True)
        print(f"{name}: pretrained weights")
    except OSError:
        model = timm.create_model(name)
        print(f"{name}: RANDOM weights, because the hub is out of reach and its cache does not have this model")
    return model


def batches(model: torch.nn.Module, folder: Path | None, steps: int, size: int):
    """Yield random crops of the folder's images, or of the two photos that come with scikit-learn."""
    from timm.data import create_transform, resolve_model_data_config

    if folder is None:
        photos = [PIL.Image.fromarray(photo) for photo in load_sample_images().images]
        print("images: scikit-learn's two photos; --images FOLDER takes yours")
    else:
        photos = [path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp")]
        print(f"images: {len(photos)} in {folder}")
    transform = create_transform(**resolve_model_data_config(model), is_training=True)
    for _ in range(steps):
        chosen = [photos[i] for i in torch.randint(len(photos), (size,))]
        opened = [PIL.Image.open(photo) if isinstance(photo, Path) else photo for photo in chosen]
        yield torch.stack([transform(photo.convert("RGB")) for photo in opened])  # (size, 3, 224, 224)


def main(model: str, images: Path | None, steps: int, batch: int) -> None:
    torch.manual_seed(0)
    vit = pretrained(model)
    plan = segue.methods.dcr_dfg(sites="blocks.*.attn", student=segue.students.LinearAttention())
    handover = segue.replace_(vit.train(), plan, total_steps=steps)
    optimizer = torch.optim.AdamW(handover.parameters(), lr=5e-4)
    for step, pixels in enumerate(batches(vit, images, steps, batch), start=1):
        with torch.no_grad(), handover.as_teacher():
            labels = vit(pixels).argmax(-1)  # what the original says; use your labels where you have them
        loss = F.cross_entropy(vit(pixels), labels) + handover.aux_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        handover.step()
        print(f"step {step}: loss {loss.item():.3f}")
    handover.finalize_()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--images", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4)
    main(**vars(parser.parse_args()))
