"""`segue report --json`: what the page says, as data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from segue.lab.report.findings import overview
from segue.lab.report.summary import Group, Method, Summary

ESTIMATES = ("final", "area", "step_seconds", "step_flops", "seconds", "flops", "peak_memory")


def as_data(summary: Summary) -> dict[str, Any]:
    """Return the methods of every group with their estimates, comparisons and findings as plain data."""
    return {
        "experiments": summary.experiments,
        "runs": summary.runs,
        "reference": summary.reference,
        "notes": summary.notes,
        "findings": list(overview(summary)),
        "groups": [_group(group) for group in summary.groups],
    }


def _group(group: Group) -> dict[str, Any]:
    comparisons = [asdict(comparison) for comparison in group.comparisons]
    known = {name: getattr(group, name) for name in ("name", "score", "teacher", "sites", "epochs", "notes", "findings")}
    return {**known, "methods": [_method(method) for method in group.methods], "comparisons": comparisons}


def _method(method: Method) -> dict[str, Any]:
    estimates = {name: None if (found := getattr(method, name)) is None else asdict(found) for name in ESTIMATES}
    held = [asdict(each) for each in method.held]
    return {"method": method.method, "label": method.label, "seeds": method.seeds, **estimates, "held": held}
