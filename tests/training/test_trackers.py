"""Trackers: what they get of every site, by Accelerate's own calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.tracking import GeneralTracker

import segue
from segue.training import trackers
from tests.training.fit_cases import SITES, VALIDATION, Net, fit

pytest.importorskip("matplotlib", reason="heat maps are drawn with matplotlib (pip install segue[lab])")


def test_tensorboard_gets_histograms_and_heat_maps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plan = segue.methods.dcr_dfg(sites=SITES)
    fitted = fit(Net(), plan, steps=4, evaluations=2, validation=VALIDATION, folder=tmp_path, trackers=["tensorboard"])
    (written,) = {path.parent for path in tmp_path.glob("**/events.out.tfevents*") if path.parent.name == "segue"}
    events = EventAccumulator(str(written), size_guidance={"images": 0}).Reload()
    assert events.Tags()["histograms"] == [f"students/blocks.{i}.attn" for i in range(3)]
    last = events.Histograms("students/blocks.1.attn")[-1]
    weights = trackers.student_weights(fitted.handover.seams["blocks.1.attn"].student)
    assert (last.step, last.histogram_value.num) == (4, len(weights))
    assert last.histogram_value.sum == pytest.approx(weights.sum().item(), rel=1e-4)
    images = [(name, image.step) for name in events.Tags()["images"] for image in events.Images(name)]
    assert images == [("sites", 0), ("sites", 2), ("sites", 4)]
    picture = events.Images("sites")[-1]
    assert picture.encoded_image_string.startswith(b"\x89PNG")
    assert picture.width > 800


class Kept(GeneralTracker):
    """A tracker as Accelerate wants it, that keeps what it gets."""

    name = "kept"
    requires_logging_directory = False
    tracker = None

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.images = name, []

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep no settings."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep no numbers."""

    def log_images(self, values: dict[str, Any], step: int | None = None) -> None:
        self.images.append((step, values))


def test_other_trackers_get_the_image_as_their_calls_take_it():
    handover = segue.replace_(Net(), segue.methods.dcr(sites=SITES), total_steps=4)
    many, one, none = Kept("wandb"), Kept("aim"), SimpleNamespace(name="numbers alone", tracker=None)
    history = [
        {"step": 0, "cosine": dict.fromkeys(handover.seams, 0.5)},
        {"step": 2, "cosine": dict.fromkeys(handover.seams, 0.9)},
    ]
    trackers.send(SimpleNamespace(trackers=[many, one, none], is_main_process=True), history, handover, 2)
    ((step, values),) = many.images
    (image,) = values["sites"]
    assert (step, image.ndim, image.shape[2]) == (2, 3, 3)
    ((_, alone),) = one.images
    assert alone["sites"].shape == image.shape
    trackers.send(SimpleNamespace(trackers=[many], is_main_process=False), history, handover, 4)
    assert len(many.images) == 1  # only one process logs


def test_wandb_writes_to_the_folder_of_the_run(tmp_path, monkeypatch):
    """Its own default is the working directory: --out would not hold everything that a run writes."""
    from accelerate import Accelerator

    given = []
    monkeypatch.delenv("WANDB_DIR", raising=False)
    monkeypatch.setattr(Accelerator, "init_trackers", lambda self, *_, init_kwargs, **__: given.append(init_kwargs))
    plan = segue.methods.dcr(sites=SITES)
    fit(Net(), plan, steps=2, evaluations=1, validation=VALIDATION, folder=tmp_path, trackers=["tensorboard"])
    assert given == [{"wandb": {"dir": str(tmp_path)}}]
    monkeypatch.setenv("WANDB_DIR", "elsewhere")
    assert trackers.tracker_settings(str(tmp_path)) == {}
    assert trackers.tracker_settings(None) == {}


def test_what_was_not_measured_or_is_not_finite_is_left_out():
    sites = ["a", "b"]
    assert trackers.by_site([{"step": 0}], "cosine", sites) is None
    steps, rows = trackers.by_site([{"step": 0}, {"step": 3, "cosine": {"b": 1.0}}], "cosine", sites)
    assert steps == [3]
    assert rows[1] == [1.0]
    student = torch.nn.Linear(2, 2)
    with torch.no_grad():
        student.weight[0, 0] = torch.inf
    assert trackers.student_weights(student).isfinite().all()
    assert len(trackers.student_weights(student)) == 5
    student.requires_grad_(False)
    assert trackers.draw([], {"a": trackers.student_weights(student)}) is not None
