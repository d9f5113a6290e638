"""What `make bench` measures on: one model, one batch, the sizes to grow through.

Command: none of its own.
Expected: the defaults need about 40 minutes on two cores; `smoke()` needs seconds and measures nothing worth reading.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MINUTES = 40.0
EACH = {  # minutes of these; the rest is building, counting, compiling and importing
    "steps": 6.5,
    "compiled": 6.5,
    "run": 4.0,
    "replaced": 2.25,
    "saturation": 6.0,
    "profile": 0.15,
    "mixers": 6.0,
    "decoding": 3.6,
}
SHARED = ("model", "model_options", "image", "patch", "classes", "sites", "batch", "small_batch")  # by all of one page


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a measurement."""

    model: str = "vit_tiny_patch16_224"
    model_options: dict[str, Any] = field(default_factory=dict)
    image: int = 224
    patch: int = 16
    classes: int = 100
    sites: str = "blocks.*.attn"
    batch: int = 8
    small_batch: int = 4  # for the complete run, the growing number of sites and the growing images
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    images: tuple[int, ...] = (96, 160, 224, 288, 384, 512, 640)
    counts: tuple[int, ...] = tuple(range(1, 13))  # of replaced modules
    run_steps: int = 30
    plan_steps: int = 1000  # of the run whose kinds of steps are counted
    coins: int = 3  # steps per round for a method whose cost changes with its coins
    least_rounds: int = 6  # fewer have no 95 % interval
    import_repeats: int = 9
    backend: str = "inductor"
    mixer_tokens: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384)
    judged_tokens: int = 8192  # where mixers are compared with softmax
    longest_softmax: int = 8192  # twice as many would take as long as all the rest
    longest_unfused: int = 4096  # whose memory is counted
    contexts: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)  # tokens that were read before the one that is decoded
    judged_context: int = 4096  # where decoding is compared with the original
    decoder: dict[str, Any] = field(
        default_factory=lambda: {
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "vocab_size": 8192,
        }
    )
    norm_model: str = "resnet18"  # with batch norm
    norm_image: int = 64
    pairs: int = 200  # of steps that may be skipped and steps that may not
    seams: int = 64  # of the chain of tiny layers that shows what a seam costs in Python
    minutes: float = MINUTES

    def seconds(self, name: str) -> float:
        """Return how long a measurement may time its steps."""
        return 60 * EACH[name] * self.minutes / MINUTES


def scaled(minutes: float) -> Settings:
    """Spread other minutes over the same work; a short run takes too few rounds for intervals, but ends in time."""
    return Settings(minutes=minutes) if minutes >= MINUTES / 2 else Settings(minutes=minutes, least_rounds=2)


def smoke() -> Settings:
    """Make everything so small that the command takes seconds."""
    return Settings(
        model_options={"patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2},
        image=32,
        patch=8,
        classes=5,
        batch=2,
        small_batch=2,
        batches=(1, 2),
        images=(16, 32),
        counts=(1, 2),
        run_steps=10,
        plan_steps=20,
        least_rounds=2,
        import_repeats=1,
        backend="eager",
        mixer_tokens=(32, 64, 128),
        judged_tokens=64,
        longest_softmax=64,
        longest_unfused=64,
        contexts=(16, 96, 160),
        judged_context=96,
        decoder={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": 50,
        },
        norm_image=32,
        pairs=2,
        seams=4,
        minutes=0.0,
    )
