"""Describe the machine, and time `import segue` on it.

Command: python -m benchmarks.performance --only import; half a minute.
Expected: well below 50 ms on top of `import torch`.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

BAR_IMPORT = 50.0  # milliseconds on top of torch
PACKAGES = ("torch", "timm", "torchdistill", "segue")
HARDWARE = ("cpu", "cores", "threads", "memory_gb", "system", "python", "packages")  # must agree within one page


def describe() -> dict[str, Any]:
    """Say where the numbers come from."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "compiler": compiler(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def comparable(about: dict[str, Any], key: str) -> Any:
    """Return what must agree within one page: not Segue's own version, which is what changes."""
    value = about[key]
    return {name: version for name, version in value.items() if name != "segue"} if key == "packages" else value


def moment() -> dict[str, Any]:
    """Say when a measurement began, and how busy the machine was with other work."""
    return {"date": time.strftime("%Y-%m-%d %H:%M"), "load": [round(load, 2) for load in os.getloadavg()]}


def keep_memory() -> bool:
    """Let glibc keep what is freed, and say whether it does.

    By default it gives blocks above 32 MB back to the system, so that each use of a long sequence begins with page faults;
    caching allocators (a GPU's, jemalloc) do not. M_MMAP_MAX = 0 and the largest M_TRIM_THRESHOLD.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(-4, 0) and mallopt(-1, 2**31 - 1))


def version(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def compiler() -> str | None:
    """Return the C++ compiler that torch.compile would call on a CPU."""
    found = next((path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), None)
    if found is None:
        return None
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return said.splitlines()[0] if said else found


def import_milliseconds(repeats: int) -> list[float]:
    """Time `import segue` on top of `import torch` in fresh processes."""
    code = "import time, torch; begun = time.perf_counter(); import segue; print(time.perf_counter() - begun)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def once() -> float:
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        return round(1000 * float(run.stdout), 1)

    once()  # writes the bytecode, as an installation does
    return [once() for _ in range(repeats)]


def typical_import(result: dict[str, Any]) -> float:
    return statistics.median(result["milliseconds"])


def _cpu() -> str:
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
