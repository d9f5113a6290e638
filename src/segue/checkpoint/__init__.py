"""Checkpoints: stop, resume, rebuild; no pickle. `state` says what is saved, `packing` how, `folders` where on disk."""

from segue.checkpoint.state import load_, save

__all__ = ["load_", "save"]


def __dir__() -> list[str]:
    return sorted(__all__)
