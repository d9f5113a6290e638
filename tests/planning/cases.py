"""Small models with candidates for the tests of planning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from segue.planning.candidates import Candidates, candidates_on, named
from segue.students import Drop, LinearAttention, NarrowMlp, Reinit, SlidingWindow
from tests.helpers import models

VIT = models.timm_vit("vit_tiny_patch16_224", 3, depth=3)


def vit() -> tuple[nn.Module, list[Any], dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 3, 32, 32, generator=generator) for _ in range(2)]
    return models.build(VIT), batches, {"sites": "blocks.*.attn", "candidates": [LinearAttention()]}


def vit_parts() -> tuple[nn.Module, list[Any], dict[str, Any]]:
    model, batches, _ = vit()
    candidates = [LinearAttention(), NarrowMlp(ratio=0.5), Drop(returns="zeros")]
    return model, batches, {"sites": ["blocks.*.attn", "blocks.*.mlp"], "candidates": candidates}


def llama() -> tuple[nn.Module, list[Any], dict[str, Any]]:
    batches = [{"input_ids": models.token_ids(), "attention_mask": models.padding()}]
    found = {"sites": "model.layers.*.self_attn", "candidates": [LinearAttention(), SlidingWindow(window=2)]}
    return models.build(models.llama), batches, found


def bert() -> tuple[nn.Module, list[Any], dict[str, Any]]:
    batches = [{"input_ids": models.token_ids(), "attention_mask": models.padding()}]
    return (
        models.build(models.bert),
        batches,
        {"sites": "bert.encoder.layer.*.attention.self", "candidates": [LinearAttention()]},
    )


def rows() -> tuple[nn.Module, list[Any], dict[str, Any]]:
    batches = [torch.randn(8, 6, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    return models.build(models.mlp), batches, {"sites": "{0,2,4}", "candidates": [Reinit()]}


@contextmanager
def tried(model: nn.Module, batches: list[Any], settings: dict[str, Any]) -> Iterator[Candidates]:
    with candidates_on(model, settings["sites"], named(settings["candidates"]), batches[0], 0) as candidates:
        yield candidates
