"""Data from the original itself: sequences that it generates, sampled once and kept on disk.

folder/self/<hash of the model and of the settings>/<batch>.safetensors
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from segue.convert.options import Conversion
from segue.convert.pretrained import Base
from segue.core import files, tensor_files
from segue.core.backbone import evaluating
from segue.errors import ConfigError, DataError
from segue.reporting.formatting import duration
from segue.training.distributed import Processes
from segue.training.progress import Progress

SELF = "self"  # the data of a conversion
AT_ONCE = 32  # sequences that are sampled together
MOST = 2048  # sequences to train on unless the settings say how many


class Samples:
    """Sequences sampled from a model, found by their number; the same for the same model and settings."""

    def __init__(
        self,
        base: Base,
        settings: Conversion,
        folder: Path | None,
        processes: Processes | None = None,
        *,
        dry_run: bool = False,  # one batch stands for all, and is not kept
    ) -> None:
        if base.kind != "causal":
            found = f"{base.name} is a {type(base.model).__name__}, which does not generate."
            raise ConfigError("--data self needs a causal language model.", found, "give --data a file or a dataset.")
        self.base, self.settings = base, settings
        self.processes = processes or Processes(next(base.model.parameters()).device)
        self.count = settings.samples or min(MOST, (settings.steps or MOST) * settings.batch * settings.accumulate)
        self.start, self.start_text = _start(base)
        known = [base.hash, settings.tokens, settings.sampling_temperature, settings.sampling_top_p, settings.seed, AT_ONCE]
        key = hashlib.sha256(json.dumps([*known, self.start]).encode()).hexdigest()[:16]
        self.folder = None if folder is None or dry_run else folder / "self" / key
        self.dry_run = dry_run
        self._batches: dict[int, Tensor] = {}

    def __getitem__(self, chosen: Tensor) -> Tensor:
        numbers = [(0 if self.dry_run else place // AT_ONCE, place % AT_ONCE) for place in chosen.tolist()]
        return torch.stack([self._batch(number)[row] for number, row in numbers])

    def sample(self, count: int, say: Callable[[str], None]) -> None:
        """Sample everything that is not there yet, each process its part, and announce how long that takes."""
        numbers = range(-(-count // AT_ONCE))
        mine = [number for number in numbers if number % self.processes.world == self.processes.rank]
        missing = [number for number in (mine if self.folder else numbers) if not self._is_kept(number)]
        show = Progress("sampling from the original" if missing and self.processes.rank == 0 else None, max(1, len(missing)))
        begun = time.monotonic()
        for done, number in enumerate(missing[:1] if self.dry_run else missing, start=1):
            self._batch(number)
            if done == 1:
                seconds = (time.monotonic() - begun) * len(missing)
                amount = f"{len(missing) * AT_ONCE:,} sequences of {self.settings.tokens} tokens"
                say(f"sampling {amount} from the original {self.start_text}: about {duration(seconds)}")
            show(done)
        self.processes.wait()

    def _is_kept(self, number: int) -> bool:
        return self.folder is not None and _file(self.folder, number).exists()

    def _batch(self, number: int) -> Tensor:
        if number not in self._batches:
            self._batches[number] = self._read(number) if self._is_kept(number) else self._drawn(number)
        return self._batches[number]

    def _read(self, number: int) -> Tensor:
        assert self.folder is not None
        path = _file(self.folder, number)
        try:
            ids = tensor_files.read(path)["ids"].long()
            if ids.shape != (AT_ONCE, self.settings.tokens):
                raise ValueError(f"its shape is {tuple(ids.shape)}")
            if not 0 <= int(ids.min()) <= int(ids.max()) < self.base.model.config.vocab_size:  # type: ignore[operator, union-attr]
                raise ValueError(f"its tokens go from {int(ids.min())} to {int(ids.max())}")
        except Exception as error:
            fault, hint = f"the samples in {path} cannot be read.", "delete that file, so that they are sampled again."
            raise DataError(fault, f"{type(error).__name__}: {error}.", hint) from error
        return ids

    def _drawn(self, number: int) -> Tensor:
        """Sample one batch; its random numbers depend on the seed and its number alone."""
        generator = torch.Generator().manual_seed(hash((self.settings.seed, number)) & 0x7FFFFFFF)
        first = torch.full((AT_ONCE, 1), self.start or 0)
        if self.start is None:
            first = torch.randint(int(self.base.model.config.vocab_size), (AT_ONCE, 1), generator=generator)  # type: ignore[arg-type, union-attr]
        model = self.base.model.to(self.processes.device)
        how = self.settings.sampling_temperature, self.settings.sampling_top_p
        ids = generate(model, first, self.settings.tokens, generator, *how)
        if self.folder is not None:
            path = _file(self.folder, number)
            with files.writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                draft = path.with_suffix(f".draft-{self.processes.rank}")
                tensor_files.write(draft, {"ids": ids.int()})
                os.replace(draft, path)
        return ids


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.safetensors"


@torch.no_grad()
def generate(model: Any, first: Tensor, length: int, generator: torch.Generator, temperature: float, top_p: float) -> Tensor:
    """Continue sequences to a length by sampling, with the model's cache; an end mark is a token as any other."""
    ids, cache = [first], None
    device = next(model.parameters()).device
    with evaluating(model):
        while len(ids) < length:
            output = model(input_ids=ids[-1].to(device), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            probabilities = (output.logits[:, -1].float().cpu() / temperature).softmax(-1)
            ids.append(drawn(nucleus(probabilities, top_p), generator))
    return torch.cat(ids, dim=1)


def drawn(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one token of each distribution, which need not sum to 1, by its inverse: torch.multinomial is much slower."""
    sums = probabilities.double().cumsum(-1)
    places = torch.rand(len(sums), 1, dtype=torch.float64, generator=generator) * sums[:, -1:]
    return torch.searchsorted(sums, places, right=True).clamp_max(sums.shape[-1] - 1)


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Keep the most probable tokens that together reach `top_p`.

    >>> nucleus(torch.tensor([[0.2, 0.5, 0.3]]), 0.6)
    tensor([[0.0000, 0.5000, 0.3000]])
    """
    if top_p >= 1:
        return probabilities
    ordered, places = probabilities.sort(-1, descending=True)
    kept = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
    return torch.zeros_like(probabilities).scatter(-1, places, kept)


def _start(base: Base) -> tuple[int | None, str]:
    """Return the token that sequences begin with, and its name; None for any of the vocabulary."""
    config: Any = base.model.config
    for name, mark in (("bos_token_id", "BOS token"), ("eos_token_id", "EOS token (it has no BOS token)")):
        for found in (getattr(base.processor, name, None), getattr(config, name, None)):
            if isinstance(found, int):
                return found, f"after its {mark}"
    return None, "after random tokens (it has neither a BOS nor an EOS token)"
