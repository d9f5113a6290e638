"""PEFT models: PEFT saves its adapters only, so the students are saved and loaded with them; LoRA around the sites."""

from __future__ import annotations

import warnings
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segue.border import PositiveInt, Seed, checked
from segue.core import tensor_files
from segue.core.handover import Handover
from segue.core.surgery import put
from segue.errors import CheckpointError, HandoverError, MissingExtraError, SegueWarning
from segue.integrations.driver import Driver
from segue.sites import Selector, select

__all__ = ["add_lora_", "base_of", "is_peft", "merge_lora_", "save_students_with_adapters"]


def __dir__() -> list[str]:
    return sorted(__all__)


FILE = "segue_students.safetensors"


@checked
def add_lora_(model: nn.Module, sites: Selector, *, rank: PositiveInt, seed: Seed = 0) -> list[str]:
    """Put LoRA adapters at the linear layers around the sites, except the output, freeze the rest, and return their names.

    They train in a handover with Plan(train="all"); `merge_lora_` makes it a plain model again.

        add_lora_(model, "model.layers.*.self_attn", rank=8)
        plan = segue.methods.transfer("model.layers.*.self_attn", student=student, train="all")
        handover = segue.replace_(model, plan, total_steps=1000)
        ...  # your loop
        merge_lora_(handover.finalize_())

    Args:
        model: The model, changed in place.
        sites: Where the replacement will be.
        rank: Of the adapters.
        seed: Of their initial weights.
    """
    peft = _peft()
    inside = tuple(f"{name}." for site in select(model, sites) for name in (*site.names, *site.members))
    head = getattr(model, "get_output_embeddings", lambda: None)()
    layers = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        and module is not head
        and not f"{name}.".startswith(inside)
    ]
    if not layers:
        raise HandoverError(
            "LoRA has no layer to adapt.",
            "There is no linear layer around the sites, except the output.",
            "choose fewer sites, or train without LoRA. Nothing was changed.",
        )
    transposed = any(type(model.get_submodule(name)).__name__ == "Conv1D" for name in layers)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers, fan_in_fan_out=transposed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)
    return layers


@checked
def merge_lora_(model: nn.Module) -> nn.Module:
    """Add the adapters of `add_lora_` to the weights that they adapt, and take them out.

        merge_lora_(handover.finalize_()).save_pretrained("converted")

    Args:
        model: The model with the adapters.
    """
    layer = _peft().tuners.lora.LoraLayer
    for name, module in [(name, module) for name, module in model.named_modules() if isinstance(module, layer)]:
        module.merge()
        put(model, name, module.get_base_layer())
    vars(model).pop("peft_config", None)
    return model.requires_grad_(True)


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise MissingExtraError("LoRA needs PEFT.", "It is not installed.", "pip install peft") from None
    return peft


def is_peft(model: Any) -> bool:
    """Return whether PEFT wraps a model.

    >>> is_peft(nn.Linear(2, 2))
    False

    Args:
        model: Any model.
    """
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(model: Any) -> Any:
    """Return the model inside PEFT's wrapper: it has the names of the plain model and remains after merging.

    >>> base_of(nn.Linear(2, 2))
    Linear(in_features=2, out_features=2, bias=True)

    Args:
        model: A model, wrapped or not.
    """
    return model.get_base_model() if is_peft(model) else model


def save_students_with_adapters(model: Any, driver: Driver) -> None:
    """Make a PEFT model save and load what the handover trains together with its adapters.

    Args:
        model: PEFT's model.
        driver: The callback that drives the handover.
    """
    save, load = model.save_pretrained, model.load_adapter

    @wraps(save)
    def save_pretrained(save_directory: str, *args: Any, **kwargs: Any) -> None:
        save(save_directory, *args, **kwargs)
        if driver.running:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _trained(driver.handover).items()}
            tensor_files.write(Path(save_directory) / FILE, tensors)
        else:
            text = f"{save_directory} has the adapters and not the students: save model.merge_and_unload() instead."
            warnings.warn(text, SegueWarning, stacklevel=2)

    @wraps(load)
    def load_adapter(model_id: str, *args: Any, **kwargs: Any) -> Any:
        result = load(model_id, *args, **kwargs)
        file, targets = Path(model_id) / FILE, _trained(driver.handover)
        stored = tensor_files.read(file) if file.exists() else {}
        if stored.keys() != targets.keys():
            raise CheckpointError(
                f"{model_id} does not contain the students of this handover.",
                f"Its {FILE} has {len(stored)} tensors, the handover trains {len(targets)}.",
                "load a checkpoint that was written by a HandoverCallback with the same plan.",
            )
        driver.handover.model.load_state_dict(stored, strict=False)
        return result

    model.save_pretrained, model.load_adapter = save_pretrained, load_adapter


def _trained(handover: Handover) -> dict[str, Tensor]:
    """Return what training changes, by its name in the model."""
    students = {f"{name}.student.": seam.student.state_dict() for name, seam in handover.seams.items()}
    return handover.backbone_that_changes() | {place + key: x for place, state in students.items() for key, x in state.items()}
