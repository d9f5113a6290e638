"""Segue inside other training frameworks: one callback each."""

from importlib import import_module
from types import ModuleType

__all__ = ["lightning", "peft", "transformers"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return import_module(f"segue.integrations.{name}")  # each needs its own package
    raise AttributeError(f"module 'segue.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
