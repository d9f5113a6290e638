"""`segue doctor`: versions, devices and extras, for a bug report; neither secrets nor paths."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata
from typing import Any

import torch
from packaging.requirements import Requirement

import segue
from segue.cli.terminal import print_json, say
from segue.reporting.formatting import memory

CORE = "segue itself"


def show(*, as_json: bool) -> None:
    """Print what is here and what is missing."""
    found = examination()
    if as_json:
        print_json(found)
        return
    for name, text in found["system"].items():
        say(f"{name}: {text}")
    for device in found["devices"]:
        say(f"device: {device['name']}, {memory(device['bytes'])}" if device["bytes"] else f"device: {device['name']}")
    say(f"packages: {', '.join(f'{name} {version}' for name, version in found['packages'].items() if version)}")
    lacking = {extra: faults for extra, faults in found["extras"].items() if faults}
    say(f"complete extras: {', '.join(extra for extra in found['extras'] if extra not in lacking) or 'none'}")
    for extra, faults in lacking.items():
        say(f"extra {extra}: {', '.join(faults)}")
    if lacking:
        say("Next: an extra is only needed for what it is for; pip install 'segue[NAME]' completes one.")


def examination() -> dict[str, Any]:
    """Return versions, devices and extras as plain data."""
    return {
        "system": {
            "segue": segue.__version__,
            "python": f"{platform.python_version()} ({platform.python_implementation()})",
            "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
            "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'no'}, threads {torch.get_num_threads()}",
            "processors": str(os.cpu_count()),
            "in a virtual environment": "yes" if sys.prefix != sys.base_prefix else "no",
        },
        "devices": _devices(),
        "packages": {need.name: _installed(need) for need in _needs()},
        "extras": _extras(),
    }


def _devices() -> list[dict[str, Any]]:
    """List the accelerators that torch can use; the processor is always one."""
    found: list[dict[str, Any]] = [{"name": "cpu", "bytes": None}]
    for number in range(torch.cuda.device_count()):
        known = torch.cuda.get_device_properties(number)
        found.append(
            {"name": f"cuda:{number}, {known.name}, capability {known.major}.{known.minor}", "bytes": known.total_memory}
        )
    if torch.backends.mps.is_available():
        found.append({"name": "mps", "bytes": None})
    return found


def _needs() -> list[Requirement]:
    try:
        needs = [Requirement(text) for text in metadata.requires("segue") or []]
    except metadata.PackageNotFoundError:  # the sources are on the path, and nothing is installed
        return []
    return sorted((need for need in needs if need.name != "segue"), key=lambda need: need.name)


def _extra_of(need: Requirement) -> str:
    named = re.search("extra == [\"']([^\"']+)", str(need.marker))
    return named[1] if named else CORE


def _installed(need: Requirement) -> str | None:
    try:
        return metadata.version(need.name)
    except metadata.PackageNotFoundError:
        return None


def _extras() -> dict[str, list[str]]:
    """Return what each extra of the installed package lacks."""
    found: dict[str, list[str]] = {}
    for need in _needs():
        extra = _extra_of(need)
        if need.marker is not None and not need.marker.evaluate({"extra": extra}):  # another Python or system needs it
            continue
        lacks, version = found.setdefault(extra, []), _installed(need)
        if version is None:
            lacks.append(f"{need.name} is missing")
        elif not need.specifier.contains(version, prereleases=True):
            lacks.append(f"{need.name} {version} is not {need.specifier}")
    return found
