"""PEFT models: PEFT saves its adapters only, so the students are saved and loaded with them."""

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
    """Return whether PEFT wraps a model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(model: Any) -> Any:
    """Return the model inside PEFT's wrapper: it has the names of the plain model and remains after merging."""
    return model.get_base_model() if is_peft(model) else model


def save_students_with_adapters(model: Any, driver: Driver) -> None:
    """Make a PEFT model save and load what the handover trains together with its adapters."""
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
