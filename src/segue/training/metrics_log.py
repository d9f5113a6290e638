"""Looks: when to look at a training, what gathers between two looks, and where they are written down."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def look_steps(looks: int | Sequence[int], total: int) -> frozenset[int]:
    """Return the steps after which to look: so many, evenly spread, or these; always the last.

    >>> sorted(look_steps(4, 100))
    [25, 50, 75, 100]
    """
    steps = (round(total * i / looks) for i in range(1, looks + 1)) if isinstance(looks, int) else looks
    return frozenset({*steps, total})


class SinceLook:
    """Running means since the last look."""

    def __init__(self, sites: list[str], device: torch.device) -> None:
        self.sites = sites
        self.device = device
        self._clear()

    def _clear(self) -> None:
        self.losses, self.steps = 0.0, 0
        self.norms = torch.zeros(len(self.sites), device=self.device)

    def add(self, loss: float, norms: Tensor) -> None:
        """Count one step in."""
        self.losses += loss
        self.steps += 1
        self.norms += norms

    def take(self) -> tuple[float | None, dict[str, float]]:
        """Return mean loss and mean gradient norm of every site, and begin anew."""
        if not self.steps:
            return None, {}
        means = (self.norms / self.steps).tolist()
        loss = self.losses / self.steps
        self._clear()
        return loss, dict(zip(self.sites, means, strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "steps": self.steps, "norms": self.norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.steps, self.norms = state["losses"], state["steps"], state["norms"].to(self.device)


class Journal:
    """The looks of a training, in memory and, where there is a folder, one line each of metrics.jsonl."""

    def __init__(self, folder: Path | None, *, writes: bool) -> None:
        self.points: list[dict[str, Any]] = []
        self.path = None if folder is None else folder / "metrics.jsonl"
        self.writes = writes  # one process does

    def add(self, point: dict[str, Any]) -> None:
        """Write a look down."""
        self.points.append(point)
        if self.path is not None and self.writes:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(point) + "\n")

    def go_back_to(self, step: int) -> None:
        """Keep the looks up to a step: what came after the checkpoint will be seen again."""
        if self.path is None:
            return
        self.points[:] = [point for point in self._read() if point["step"] <= step]
        if self.writes and self.path.exists():
            draft = self.path.with_name(".metrics-new")
            draft.write_text("".join(json.dumps(point) + "\n" for point in self.points), encoding="utf-8")
            os.replace(draft, self.path)

    def _read(self) -> list[dict[str, Any]]:
        """Read the looks; the last line may be torn by a kill."""
        assert self.path is not None
        points: list[dict[str, Any]] = []
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            try:
                points.append(json.loads(line))
            except ValueError:
                break
        return points


def flat(point: dict[str, Any], at: str = "") -> dict[str, float]:
    """Name every number of a look by its path, as trackers want it.

    >>> flat({"step": 3, "students": {"accuracy": 0.5}, "loss": None})
    {'step': 3, 'students/accuracy': 0.5}
    """
    found: dict[str, float] = {}
    for name, value in point.items():
        if isinstance(value, dict):
            found |= flat(value, f"{at}{name}/")
        elif isinstance(value, int | float):
            found[f"{at}{name}"] = value
    return found
