"""The processes that train: devices, precision and trackers by Accelerate; DDP, FSDP2 and compilation of the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from segue.errors import ConfigError, MissingExtraError, nearest
from segue.training.evaluation import Processes
from segue.training.recipe import Recipe


def accelerator(recipe: Recipe, trackers: Sequence[str], folder: Path | None) -> Any:
    """Build the Accelerator of one training."""
    make = _accelerate("Accelerator")
    from accelerate.state import AcceleratorState

    if recipe.precision == "fp16" and not torch.accelerator.is_available():
        raise ConfigError(
            "Recipe(precision='fp16') was asked for.", "There is no GPU, and a CPU has no fp16 training.", "use 'bf16' here."
        )
    _require_trackers(trackers, folder)
    AcceleratorState._reset_state()  # an earlier fit in this process may have had another precision
    made = make(
        cpu=not torch.accelerator.is_available(),
        mixed_precision="no" if recipe.precision == "float32" else recipe.precision,
        log_with=list(trackers) or None,
        project_dir=None if folder is None else str(folder),
    )
    made.sync_gradients = True  # an Accelerator of the user may have left it False, and it is one for all of them
    return made


def spread(model: nn.Module, units: Iterable[nn.Module], recipe: Recipe, processes: Processes) -> nn.Module:
    """Wrap a model as the launch asks: FSDP2, each unit for itself, or DDP, or not at all; and compile it."""
    network = model
    if processes.world > 1 and recipe.shard:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        _require_same_weights(model, processes)
        mesh = init_device_mesh(processes.device.type, (processes.world,))
        for unit in units:
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif processes.world > 1:
        place = [processes.device] if processes.device.type != "cpu" else None
        network = nn.parallel.DistributedDataParallel(model, device_ids=place)
    return torch.compile(network) if recipe.compile else network  # type: ignore[return-value]


def _require_same_weights(model: nn.Module, processes: Processes) -> None:
    """Refuse to shard what differs between processes; DDP would send the first one's weights to all, FSDP2 mixes them."""
    sums = torch.stack([parameter.detach().double().sum().to(processes.device) for parameter in model.parameters()])
    mean = processes.total(sums) / processes.world
    apart = processes.total((~torch.isclose(sums, mean, rtol=1e-6, equal_nan=True)).double())  # every process must know
    different = [name for (name, _), count in zip(model.named_parameters(), apart.tolist(), strict=True) if count]
    if different:
        raise ConfigError(
            f"a model was to be sharded over {processes.world} processes.",
            f"They hold different weights ({different[0]!r} first).",
            "load the whole model in each; transformers needs FSDP_CPU_RAM_EFFICIENT_LOADING=false for that.",
        )


def launched() -> Processes:
    """Return the processes that were launched together (torchrun, accelerate launch), connected."""
    state = _accelerate("PartialState")(cpu=not torch.accelerator.is_available())
    return Processes(state.device, state.process_index, state.num_processes)


def _accelerate(name: str) -> Any:
    try:
        import accelerate
    except ImportError:
        raise MissingExtraError(
            "a model was to be trained by fit().", "Accelerate is not installed.", "pip install segue[train]"
        ) from None
    return getattr(accelerate, name)


def _require_trackers(trackers: Sequence[str], folder: Path | None) -> None:
    if not trackers:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    available = [str(tracker) for tracker in get_available_trackers()]
    for name in trackers:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = [str(tracker) for tracker in LOGGER_TYPE_TO_CLASS]
            raise ConfigError(f"the tracker {name!r} was asked for.", nearest(name, known), "these are Accelerate's trackers.")
        if name not in available:
            raise ConfigError(f"the tracker {name!r} was asked for.", "Its package is not installed.", f"pip install {name}")
    if folder is None:
        raise ConfigError(f"the trackers {', '.join(trackers)} were asked for.", "They need a place.", "give fit a folder=.")
