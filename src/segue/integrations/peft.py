"""PEFT saves its adapters and nothing else: students travel along."""

from __future__ import annotations

import warnings
from functools import wraps
from pathlib import Path
from typing import Any

from torch import Tensor

from segue.core import tensor_files
from segue.core.handover import Handover
from segue.errors import CheckpointError, SegueWarning
from segue.integrations.driver import Driver

FILE = "segue_students.safetensors"


def is_peft(model: Any) -> bool:
    """Tell whether PEFT wraps a model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(model: Any) -> Any:
    """Return the model inside PEFT's wrapper: its names are those of the plain model, and merging leaves it behind."""
    return model.get_base_model() if is_peft(model) else model


def carry_students(model: Any, driver: Driver) -> None:
    """Let a PEFT model save what the handover trains beside its adapters, and load it with them."""
    save, load = model.save_pretrained, model.load_adapter

    @wraps(save)
    def save_pretrained(save_directory: str, *args: Any, **kwargs: Any) -> None:
        save(save_directory, *args, **kwargs)
        if driver.running:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _trained(driver.handover).items()}
            tensor_files.write(Path(save_directory) / FILE, tensors)
            return
        warnings.warn(
            f"{save_directory} holds the adapters only, because PEFT saves nothing else; the students are in the model: save "
            "model.merge_and_unload().",
            SegueWarning,
            stacklevel=2,
        )

    @wraps(load)
    def load_adapter(model_id: str, *args: Any, **kwargs: Any) -> Any:
        result = load(model_id, *args, **kwargs)
        file, targets = Path(model_id) / FILE, _trained(driver.handover)
        stored = tensor_files.read(file) if file.exists() else {}
        if stored.keys() != targets.keys():
            raise CheckpointError(
                f"students and adapters were to be loaded from {model_id}.",
                f"Its {FILE} holds {len(stored)} tensors, the handover trains {len(targets)}.",
                "load a checkpoint that a HandoverCallback with the same plan has written.",
            )
        driver.handover.model.load_state_dict(stored, strict=False)
        return result

    model.save_pretrained, model.load_adapter = save_pretrained, load_adapter


def _trained(handover: Handover) -> dict[str, Tensor]:
    """Return what training changes, by its name in the model."""
    students = {f"{name}.student.": seam.student.state_dict() for name, seam in handover.seams.items()}
    return handover.backbone_that_changes() | {place + key: x for place, state in students.items() for key, x in state.items()}
