"""Render docs/performance.md from saved results; every number on it comes from there.

Command: python -m benchmarks.performance --render; seconds.
Expected: the machine, the bars, then one section per measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import (
    bars,
    compiled,
    decoding,
    guarding,
    local_pass,
    machine,
    memory,
    mixers,
    replaced,
    saturation,
    seam_profile,
    skipping,
    step_time,
    whole_run,
)
from benchmarks.bars import Bar
from benchmarks.timing import percent
from benchmarks.trainees import AGAIN, BLEND, BY_HAND, TEACHERS

Results = dict[str, Any]


def render(saved: dict[str, Any]) -> str:
    """Write the page."""
    results, settings = saved["measurements"], saved["settings"]
    judged = all_bars(results)
    lines = [
        "# Performance",
        "",
        f"What a handover costs compared with the same model built by hand, and with other libraries: {settings['model']}, all "
        "attention replaced by fresh attention, frozen backbone, AdamW. Every number is written by the command itself. Times "
        "are ratios of steps that took turns within one run: compare ratios, never milliseconds. A 95 % interval is that of "
        "the median over rounds; of fewer than six rounds it is the range.",
        "",
        *where(saved),
        "",
        "## Bars",
        "",
        *bars.table(judged),
        "",
        verdict(judged),
        *explanation(results, judged),
    ]
    for title, write in sections(results).items():
        lines += ["", f"## {title}", "", *write()]
    return "\n".join(lines) + "\n"


def where(saved: dict[str, Any]) -> list[str]:
    """Describe the machine, the command and the load."""
    about, results = saved["machine"], saved["measurements"]
    loads = [result["when"]["load"][0] for result in results.values()]
    dates = sorted(result["when"]["date"] for result in results.values())
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in about["packages"].items())
    return [
        "| | |",
        "|---|---|",
        "| command | `make bench` (`python -m benchmarks.performance`) |",
        f"| date | {dates[0]}" + (f" to {dates[-1]} |" if dates[-1] != dates[0] else " |"),
        f"| processor | {about['cpu']}, {about['cores']} cores, {about['memory_gb']:g} GB; torch threads: {about['threads']} |",
        f"| load average as each measurement began | {min(loads):.2f} to {max(loads):.2f}, our own work included |",
        f"| software | {about['system']}, Python {about['python']}, {packages} |",
        f"| C++ compiler | {about['compiler'] or 'none'} |",
    ]


def taken(name: str, result: dict[str, Any]) -> str:
    """Say when and how a section was measured, since sections need not come from one run."""
    segue = f", segue {result['segue']}" if "segue" in result else ""
    return (
        f"`--only {name}`: {result['when']['date']}, load {result['when']['load'][0]:.2f}, {result['seconds']:.0f} s, "
        f"`--minutes {result['minutes']:g}`{segue}."
    )


def all_bars(results: Results) -> list[Bar]:
    """Collect the bars of what was measured."""
    judged: list[Bar] = []
    if "steps" in results:
        judged += step_time.bars(results["steps"])
    if "compiled" in results:
        judged += compiled.bars(results["compiled"])
    if "run" in results:
        judged += whole_run.bars(results["run"], results.get("steps"))
    if "memory" in results:
        judged += memory.bars(results["memory"])
    if "mixers" in results:
        judged += mixers.bars(results["mixers"])
    if "decoding" in results:
        judged += decoding.bars(results["decoding"])
    if "import" in results:
        claim = "`import segue` on top of `import torch`"
        judged.append(Bar.of_count(claim, machine.typical_import(results["import"]), machine.BAR_IMPORT, " ms"))
    return judged


def verdict(judged: list[Bar]) -> str:
    """Say in one sentence how the bars fared."""
    missed = [bar for bar in judged if bar.missed]
    unmeasured = [bar for bar in judged if bar.measured == "not measured"]
    unsure = [bar for bar in judged if "but the interval" in bar.verdict]
    said = [f"{len(judged) - len(missed) - len(unmeasured)} of {len(judged)} bars are met."]
    if unsure:
        said.append(f"Of these, {len(unsure)} by the median alone: the noise of this run reaches beyond the bar.")
    if unmeasured:
        said.append(f"{len(unmeasured)} could not be measured here.")
    if missed:
        names = "; ".join(bar.claim for bar in missed)
        said.append(f"Missed: {names}.")
    return " ".join(said)


def explanation(results: Results, judged: list[Bar]) -> list[str]:
    """Name what noise, operators and seams contribute to a missed bar, as far as it was measured."""
    if not any(bar.missed for bar in judged):
        return []
    said = []
    if "steps" in results:
        noise = step_time.ratios(results["steps"])[AGAIN]
        said.append(f"Noise: the same hand-built model, built twice, differs by {noise.fine} in this run.")
    if "compiled" in results and (same := compiled.noise(results["compiled"])):
        said.append(same)
    if "profile" in results:
        total = {name: sum(spent.values()) for name, spent in results["profile"]["operators"].items()}
        added, expected = total[BLEND] - total[BY_HAND], total[TEACHERS]
        said.append(
            f"Operators, by the [profile](#profile): {added:+.1f} ms from student-only to a blend; "
            f"the teachers' forward alone takes {expected:.1f} ms."
        )
    if "profile" in results and "steps" in results:
        share = seam_profile.closed_share(results["profile"], results["steps"])
        said.append(f"Seams: their own Python, measured apart, would be {percent(share, 2)} of a student-only step.")
    return ["", *(f"- {line}" for line in said)]


def sections(results: Results) -> dict[str, Callable[[], list[str]]]:
    """Return what writes each section, for what was measured."""
    steps = results.get("steps")
    writers: dict[str, tuple[str, Callable[[Any], list[str]]]] = {
        "steps": ("Step time", step_time.section),
        "compiled": ("Compiled", compiled.section),
        "run": ("Whole run", lambda result: whole_run.section(result, steps)),
        "memory": ("Memory", memory.section),
        "replaced": ("Number of replaced modules", replaced.section),
        "saturation": ("Saturation", saturation.section),
        "profile": ("Profile", lambda result: seam_profile.section(result, steps)),
        "skipping": ("Steps that may be skipped", skipping.section),
        "guarding": ("Steps under a guard", guarding.section),
        "local": ("Local fit", local_pass.section),
        "mixers": ("Mixers", mixers.section),
        "decoding": ("Decoding", decoding.section),
    }
    return {
        title: lambda name=name, write=write: [*write(results[name]), "", taken(name, results[name])]
        for name, (title, write) in writers.items()
        if name in results
    }
