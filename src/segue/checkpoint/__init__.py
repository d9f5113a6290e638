"""Checkpoints: stop, resume, rebuild; safetensors and JSON, no pickle."""

from segue.checkpoint.state import load_, save

__all__ = ["load_", "save"]
