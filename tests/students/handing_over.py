"""A complete handover at some sites: train, finalize, save, load into a fresh model, compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import GluMlp, SwiGLU
from torch import nn

import segue
from tests.helpers.models import CLASSES, Batch, build


def timm_vit(mlp_layer: Any = None, **settings: Any) -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": CLASSES}
    layer = {} if mlp_layer is None else {"mlp_layer": mlp_layer}
    return timm.models.VisionTransformer(**sizes, **layer, **settings)


def timm_swiglu() -> nn.Module:
    return timm_vit(SwiGLU)


def timm_glu() -> nn.Module:
    return timm_vit(GluMlp)


def through_a_handover(
    make: Callable[[], nn.Module], batch: Batch, plan: segue.Plan, folder: Path, *, student: Any = None
) -> nn.Module:
    """Return the finalized model, whose outputs equal those of a fresh model that loaded it."""
    model = build(make)
    original = batch.predict(model)
    handover = segue.replace_(model, plan, total_steps=4)
    torch.testing.assert_close(batch.predict(model), original, rtol=0, atol=0)  # alpha is 1
    model.train()
    before = [p.detach().clone() for seam in handover.seams.values() for p in seam.student.parameters()]
    optimizer = torch.optim.AdamW(handover.parameters(), lr=1e-2)
    for _ in range(4):
        loss = batch.loss(model) + handover.aux_loss()
        assert loss.isfinite()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        handover.step()
    after = [p for seam in handover.seams.values() for p in seam.student.parameters()]
    assert not before or any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    handover.finalize_()
    segue.save(model, folder)
    fresh = segue.load_(build(make, seed=5), folder, **({} if student is None else {"student": student}))
    torch.testing.assert_close(batch.predict(fresh), batch.predict(model), rtol=0, atol=0)
    assert not torch.equal(batch.predict(model), original)
    return model


def compiled_equals_eager(module: nn.Module, *args: torch.Tensor) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), module(*args))
