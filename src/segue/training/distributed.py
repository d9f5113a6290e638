"""The processes of a training: devices, precision and trackers by Accelerate; DDP, FSDP2 and compilation of the model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from segue.errors import ConfigError, MissingExtraError, SegueWarning, nearest
from segue.training.batches import mapped, part_for

if TYPE_CHECKING:
    from segue.training.recipe import Recipe  # which has a guard, and that needs this


T = TypeVar("T")


class Processes:
    """The processes that train together; a single one unless more were launched."""

    def __init__(self, device: torch.device, rank: int = 0, world: int = 1, *, split: bool = True) -> None:
        self.device = device
        self.rank = rank
        self.world = world
        self.split = split  # every process reads the same batches and takes its part

    @classmethod
    def current(cls, device: torch.device) -> Processes:
        """Return the processes that a framework or the user has connected."""
        ranks = torch.distributed if torch.distributed.is_available() and torch.distributed.is_initialized() else None
        return cls(device) if ranks is None else cls(device, ranks.get_rank(), ranks.get_world_size())

    def part(self, batch: Any) -> tuple[Any, float]:
        """Return this process' part of a batch, on its device, and the part's weight in the mean."""
        part, weight = part_for(batch, self.rank, self.world) if self.split else (batch, 1.0)
        return mapped(lambda tensor: tensor.to(self.device, non_blocking=True), part), weight

    def wait(self) -> None:
        """Wait for all processes."""
        if self.world > 1:
            torch.distributed.barrier()

    def total(self, values: Tensor) -> Tensor:
        """Sum a tensor over the processes."""
        if self.world == 1:
            return values
        here = values.to(self.device)
        torch.distributed.all_reduce(here)
        return here.to(values.device)

    def of_first(self, value: T) -> T:
        """Return, in all processes, the value of the first."""
        if self.world == 1:
            return value
        held: list[Any] = [value]
        torch.distributed.broadcast_object_list(held, src=0)
        found: T = held[0]
        return found

    def first(self, text: str | None) -> str | None:
        """Return, in all processes, what the first process that has something to say says."""
        if self.world == 1:
            return text
        said: list[str | None] = [None] * self.world
        torch.distributed.all_gather_object(said, text)
        return next((f"{one} (in process {rank})" for rank, one in enumerate(said) if one is not None), None)


def launched() -> Processes:
    """Connect the processes that were launched together (torchrun, accelerate launch), and return them."""
    state = _accelerate("PartialState")(cpu=not torch.accelerator.is_available())
    return Processes(state.device, state.process_index, state.num_processes)


def accelerator(recipe: Recipe, trackers: Sequence[str], folder: Path | None) -> Any:
    """Build the Accelerator of one training."""
    make = _accelerate("Accelerator")
    from accelerate.state import AcceleratorState

    if recipe.precision == "fp16" and not torch.accelerator.is_available():
        raise ConfigError("Recipe(precision='fp16') needs a GPU.", "A CPU has no fp16 training.", "use 'bf16' here.")
    if recipe.precision == "bf16" and not (torch.accelerator.is_available() or has_bf16_units()):
        text = "this processor has no bf16 units: precision='bf16' is emulated, many times slower than 'float32'."
        warnings.warn(text, SegueWarning, stacklevel=3)
    _check_trackers(trackers, folder)
    AcceleratorState._reset_state()  # an earlier fit in this process may have had another precision
    made = make(
        cpu=not torch.accelerator.is_available(),
        mixed_precision="no" if recipe.precision == "float32" else recipe.precision,
        log_with=list(trackers) or None,
        project_dir=None if folder is None else str(folder),
    )
    made.sync_gradients = True  # all Accelerators share it, and one of the user's may have left it False
    return made


def has_bf16_units() -> bool:
    """Return whether the processor multiplies bf16 by itself, as far as torch can tell."""
    if not hasattr(torch.cpu, "get_capabilities"):  # of an older torch
        return True
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def spread(model: nn.Module, units: Iterable[nn.Module], recipe: Recipe, processes: Processes) -> nn.Module:
    """Wrap a model for several processes (FSDP2 with each unit on its own, or DDP), and compile it if the recipe says so."""
    network = model
    if processes.world > 1 and recipe.shard:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        _check_same_weights(model, processes)
        mesh = init_device_mesh(processes.device.type, (processes.world,))
        for unit in units:
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif processes.world > 1:
        place = [processes.device] if processes.device.type != "cpu" else None
        network = nn.parallel.DistributedDataParallel(model, device_ids=place)
    return torch.compile(network) if recipe.compile else network  # type: ignore[return-value]


def _check_same_weights(model: nn.Module, processes: Processes) -> None:
    """Refuse to shard weights that differ: DDP would broadcast those of the first process, FSDP2 mixes them."""
    sums = torch.stack([parameter.detach().double().sum().to(processes.device) for parameter in model.parameters()])
    mean = processes.total(sums) / processes.world
    apart = processes.total((~torch.isclose(sums, mean, rtol=1e-6, equal_nan=True)).double())  # every process must know
    different = [name for (name, _), count in zip(model.named_parameters(), apart.tolist(), strict=True) if count]
    if different:
        raise ConfigError(
            f"a model cannot be sharded over {processes.world} processes that hold different weights.",
            f"The first parameter that differs is {different[0]!r}.",
            "load the complete model in each process; transformers needs FSDP_CPU_RAM_EFFICIENT_LOADING=false for that.",
        )


def _accelerate(name: str) -> Any:
    try:
        import accelerate
    except ImportError:
        raise MissingExtraError("training needs Accelerate.", "It is not installed.", "pip install segue[train]") from None
    return getattr(accelerate, name)


def _check_trackers(trackers: Sequence[str], folder: Path | None) -> None:
    if not trackers:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    available = [str(tracker) for tracker in get_available_trackers()]
    for name in trackers:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = [str(tracker) for tracker in LOGGER_TYPE_TO_CLASS]
            raise ConfigError(f"there is no tracker {name!r}.", nearest(name, known), "choose one of Accelerate's trackers.")
        if name not in available:
            raise ConfigError(f"the tracker {name!r} cannot start.", "Its package is not installed.", f"pip install {name}")
    if folder is None:
        names = ", ".join(trackers)
        raise ConfigError(f"the trackers ({names}) have no folder to write to.", "folder is None.", "give fit a folder=.")
