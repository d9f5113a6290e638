"""Parts of a diffusion transformer replaced: which students predict the noise as well, by which method.

Command:  segue grid experiments/dit --out runs/dit -o folder=data/fashion-mnist
          python -m experiments.dit.report runs/dit
Try it:   segue grid experiments/dit --out runs/dit_try -o folder=data/fashion-mnist -o seeds=1 -o steps=4 -o teacher_steps=8
Runtime:  on one shared core, 14 minutes for the teacher, then 36 runs of half a minute to two minutes each.
Expected: teacher 0.0605; re-initialised attention 0.090 to 0.096, a quarter of the MLP 0.078 to 0.081, linear attention 0.064
          to 0.065, a window 0.063. DCR + DFG + distillation is best for the MLP and last for the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segue import methods
from segue.data.augment import normalise
from segue.data.dataset import Dataset
from segue.data.files import optional
from segue.data.torchvision import Idx
from segue.errors import ConfigError
from segue.lab.config import Run, Stage, Teacher
from segue.lab.presets import Preset
from segue.lab.tasks import Loaded
from segue.lab.variants import Variant
from segue.losses import PredictionDistillation
from segue.sites import Selector
from segue.students import LinearAttention, NarrowMlp, Reinit, SlidingWindow
from segue.training.batches import Batches, InOrder
from segue.training.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class DiT:
    """A diffusion transformer with adaLN-Zero; the data decides its images and classes."""

    patch: int = 7
    width: int = 128
    depth: int = 6
    heads: int = 4

    sites = "transformer_blocks.*.attn1"
    head = "proj_out_2.*"

    def __call__(self, data: Dataset, seed: int) -> nn.Module:
        diffusers = optional("diffusers", "diffusers", "a DiT cannot be built.")
        channels, pixels, _ = data.train.inputs.shape[1:]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = diffusers.DiTTransformer2DModel(
                num_attention_heads=self.heads,
                attention_head_dim=self.width // self.heads,
                in_channels=channels,
                num_layers=self.depth,
                sample_size=pixels,
                patch_size=self.patch,
                num_embeds_ada_norm=data.classes,
                norm_num_groups=1,
            )
        for name, module in model.named_modules():  # as published: each block starts as the identity, the prediction as zero
            if name.endswith("norm1.linear") or name == "proj_out_2":
                nn.init.zeros_(module.weight)
                nn.init.zeros_(module.bias)
        return model


class NoisePrediction:
    """The mean squared error of the predicted noise, on (noisy images, time steps, labels, noise)."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self._errors(model, batch).mean()

    def scores(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the error of every example, and the share of the noise's variance (1) that is explained."""
        errors = self._errors(model, batch)
        return {"explained": 1 - errors, "epsilon_mse": errors}

    def _errors(self, model: nn.Module, batch: Any) -> Tensor:
        noisy, steps, labels, noise = batch
        predicted = model(noisy, timestep=steps, class_labels=labels).sample
        return (predicted.float() - noise).square().flatten(1).mean(1)


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """Predict the noise in images of a data set, at every time step of DDPM's linear schedule."""

    source: Callable[[], Dataset]
    model: DiT = field(default_factory=DiT)
    eval_examples: int = 500  # held-out examples of every evaluation
    final_examples: int = 2000  # and of the last one

    score = "explained"

    @property
    def sites(self) -> Selector:
        return self.model.sites

    @property
    def head(self) -> str:
        return self.model.head

    @property
    def loss(self) -> Any:
        return NoisePrediction()

    def load(self, *, data_fraction: float = 1.0, seed: int = 0) -> Loaded:
        """Load the data; each held-out image has one noise and one time step, the same in every run."""
        if data_fraction != 1:
            raise ConfigError(
                f"this experiment uses all of its training images, not {data_fraction}.",
                "Noise is drawn for every image, and no part of them is chosen.",
                "leave data_fraction out.",
            )
        data = self.source()
        scheduler = optional("diffusers", "diffusers", "images cannot be noised.").DDPMScheduler()
        count = min(self.final_examples, len(data.test))

        def noised(images: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
            pixels = normalise(images, (0.5,) * images.shape[1], (0.5,) * images.shape[1], None)
            steps = torch.randint(len(scheduler.betas), (len(images),), generator=generator)
            noise = torch.randn(pixels.shape, generator=generator)
            return scheduler.add_noise(pixels, noise, steps), steps, labels, noise

        def batch(chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
            return noised(data.train.inputs[chosen], data.train.labels[chosen], generator)

        fixed = noised(data.test.inputs[:count], data.test.labels[:count], torch.Generator().manual_seed(0))

        def held_out(chosen: Tensor) -> tuple[Tensor, ...]:
            return tuple(part[chosen] for part in fixed)

        return Loaded(
            train=lambda size, seed: Batches(len(data.train), size, batch, seed=seed),
            validation=InOrder(min(self.eval_examples, count), 250, held_out),
            final=InOrder(count, 250, held_out),
            build=lambda seed: self.model(data, seed),
            examples=len(data.train),
        )


ATTENTION, MLP = "transformer_blocks.*.attn1", "transformer_blocks.*.ff"
STUDENTS: dict[str, dict[str, object]] = {
    "Re-initialised attention": {"sites": ATTENTION, "student": Reinit()},
    "A quarter of the MLP": {"sites": MLP, "student": NarrowMlp(ratio=0.25)},
    "Linear attention": {"sites": ATTENTION, "student": LinearAttention(feature_map="elu")},
    "Sliding window": {"sites": ATTENTION, "student": SlidingWindow(window=2)},
}
METHODS = (
    Variant("student_only", methods.LABELS["student_only"], methods.student_only),
    Variant("local_regression", "Local regression, then finetuning", methods.lolcats),
    Variant(
        "dcr_dfg_prediction",
        "DCR + DFG + prediction distillation",
        partial(methods.dcr_dfg, distill=PredictionDistillation()),
    ),
)


def teacher(folder: str | None = None, steps: int = 2000) -> Teacher:
    """Return how the teacher is trained."""
    task = Denoising(source=Idx(folder=folder or str(Path(os.environ.get("SEGUE_DATA", "data")) / "fashion-mnist")))
    return Teacher(task=task, stages=(Stage(recipe=Recipe(steps=steps, lr=1e-3, warmup=0.05)),), batch=64)


def runs(folder: str | None = None, seeds: int = 3, steps: int = 80, teacher_steps: int = 2000) -> list[Run]:
    """Return students x methods x seeds."""
    trained = teacher(folder, teacher_steps)
    recipe = Recipe(steps=steps, lr=1e-3, warmup=0.05)
    preset = Preset(name="dit", task=trained.task, teacher=trained, recipe=recipe, batch=64, evaluations=1, diagnostics=())
    return [
        preset.run(variant, seed=seed, group=group, **settings)
        for group, settings in STUDENTS.items()
        for seed in range(seeds)
        for variant in METHODS
    ]
