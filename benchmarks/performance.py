"""Measure what a handover and its operators cost, save the numbers and render docs/performance.md.

Command: make bench, or python -m benchmarks.performance; about 40 minutes on two cores, `--minutes` scales it.
Expected: the bars at the top of the page are met; where one is missed, the page says so and has the profile.
Other work on the machine widens the intervals: run it alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    compiled,
    decoding,
    figures,
    guarding,
    local_pass,
    machine,
    memory,
    mixers,
    page,
    replaced,
    saturation,
    seam_profile,
    skipping,
    step_time,
    whole_run,
)
from benchmarks.settings import MINUTES, SHARED, Settings, scaled, smoke

ROOT = Path(__file__).parent.parent
MEASUREMENTS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "import": lambda settings: {"milliseconds": machine.import_milliseconds(settings.import_repeats)},
    "memory": memory.measure,
    "steps": step_time.measure,
    "run": whole_run.measure,
    "replaced": replaced.measure,
    "saturation": saturation.measure,
    "profile": seam_profile.measure,
    "skipping": skipping.measure,
    "guarding": guarding.measure,
    "local": local_pass.measure,
    "mixers": mixers.measure,
    "decoding": decoding.measure,
    "compiled": compiled.measure,  # last, because it leaves the compiler's threads behind
}


def main(arguments: list[str] | None = None) -> None:
    """Measure, save, draw and render."""
    options = _options(arguments)
    settings = smoke() if options.smoke else scaled(options.minutes)
    if options.threads:
        torch.set_num_threads(options.threads)
    saved = _earlier(options.results) if options.only or options.render else None
    if options.render and saved is None:
        sys.exit(f"{options.results} does not exist: measure first.")
    if not options.render:
        saved = _begun(saved, settings, options.results)
        for name in options.only or MEASUREMENTS:
            saved["measurements"][name] = _measured(name, settings)
            _save(saved, options.results)
    assert saved is not None
    figures.draw(saved["measurements"], options.page.parent / "figures")
    text = page.render(saved)
    options.page.write_text(text, encoding="utf-8")
    print(text.partition("## Bars")[2].partition("\n## ")[0].strip())
    print(f"\n{options.results}\n{options.page}")


def _measured(name: str, settings: Settings) -> dict[str, Any]:
    when, begun = machine.moment(), time.perf_counter()
    print(f"{name} ...", end=" ", flush=True)
    result = MEASUREMENTS[name](settings)
    seconds = time.perf_counter() - begun
    print(f"{seconds:.0f} s", flush=True)
    about = {"when": when, "minutes": settings.minutes, "segue": machine.version("segue")}
    return {**about, "seconds": round(seconds, 1), **result}


def _begun(earlier: dict[str, Any] | None, settings: Settings, path: Path) -> dict[str, Any]:
    """Start a set of results, or continue an earlier one of the same machine and model.

    Sizes, rounds and the version of Segue may differ: every section says its own.
    """
    shared = {name: value for name, value in dataclasses.asdict(settings).items() if name in SHARED}
    here = json.loads(json.dumps({"machine": machine.describe(), "settings": shared}))
    if earlier is None:
        return {**here, "measurements": {}}
    differing = [
        key
        for key in machine.HARDWARE
        if machine.comparable(earlier["machine"], key) != machine.comparable(here["machine"], key)
    ]
    differing += [name for name in SHARED if earlier["settings"][name] != here["settings"][name]]
    if differing:
        names = ", ".join(differing)
        sys.exit(
            f"{path} was measured on another machine or with other settings ({names} differ): run everything, without --only."
        )
    return {**earlier, "settings": here["settings"]}


def _save(saved: dict[str, Any], path: Path) -> None:
    """Write JSON with every list of numbers on one line."""
    text = json.dumps(saved, indent=1)
    text = re.sub(r"\[[-\d.,e\s]+\]", lambda match: "[" + ", ".join(match[0][1:-1].replace(",", " ").split()) + "]", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def _earlier(path: Path) -> dict[str, Any] | None:
    if path.exists():
        earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return earlier
    return None


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.performance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=MINUTES, help="total time in minutes (%(default)g)")
    parser.add_argument(
        "--only",
        action="append",
        choices=list(MEASUREMENTS),
        metavar="NAME",
        help=f"one measurement: {', '.join(MEASUREMENTS)}",
    )
    parser.add_argument("--render", action="store_true", help="measure nothing, draw and write the page from saved results")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and hardly any rounds: shows that everything runs")
    parser.add_argument("--threads", type=int, help="number of torch threads (torch's own default)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "performance.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
