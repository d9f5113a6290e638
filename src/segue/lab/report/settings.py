"""Settings: where the configurations of the methods differ, and what else a reader needs to repeat the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from segue.phases import Phase
from segue.plan import Plan
from segue.reporting.formatting import NOTHING, counted, duration, listed, shortened, significant
from segue.reporting.records import Result
from segue.students import Reinit

if TYPE_CHECKING:
    from segue.lab.report.summary import Group

OWN = ("seed", "label", "method", "choice", "name", "group")  # of each run or method: no setting to compare
LONGEST = 220  # letters of a value
PHASE = Plan(sites="*", student=Reinit(), phases=(Phase(name=""),)).to_dict()["phases"][0]
EVENTS = ["Method", "Seed", "Step", "What", "Sites", "Then"]


def differences(group: Group) -> list[list[Any]]:
    """Return what each method does unlike most: its label, and pairs of a setting's path and its value.

    The first row has what most methods share where any differs. Without differences there are no rows.
    """
    configs = {method.label: method.runs[0].run_info.config for method in group.methods}
    found: dict[str, dict[str, str]] = {}
    _compare("", configs, found)
    usual = {path: Counter(values.values()).most_common(1)[0] for path, values in found.items()}
    shared = [[path, value] for path, (value, count) in usual.items() if count > 1]
    rows = [
        [
            label,
            [[path, values[label]] for path, values in found.items() if values[label] != usual[path][0] or usual[path][1] < 2],
        ]
        for label in configs
    ]
    return [["Most methods", shared], *rows] if found and len(configs) > 1 else []


def _compare(path: str, values: Mapping[str, Any], found: dict[str, dict[str, str]]) -> None:
    """Collect the paths at which values differ; objects of one kind are compared field by field, others as a whole."""
    first, *others = values.values()
    if all(value == first for value in others):
        return
    if isinstance(first, dict) and all(isinstance(one, dict) and one.get("kind") == first.get("kind") for one in others):
        for key in dict.fromkeys(key for value in values.values() for key in value):
            if key not in OWN:
                inside = {name: value.get(key) for name, value in values.items()}
                _compare(f"{path}.{key}" if path else key, inside, found)
        return
    found[path] = {name: shortened(written(value), LONGEST) for name, value in values.items()}


def written(value: Any) -> str:
    """Write a value of a saved configuration as its code would read.

    >>> written({"kind": "gates.GumbelSoftmax", "temperature": 1.0}), written([0.5, None])
    ('GumbelSoftmax(temperature=1)', '[0.5, None]')
    >>> written({"kind": "phases.Phase", "name": "local fit", "local": True, "split": 4, "reuse": 1, "final_lr": 0.0})
    'Phase(name=local fit, local=True, split=4)'
    """
    if isinstance(value, dict):
        usual = PHASE if value.get("kind") == PHASE["kind"] else {}  # of its fifteen settings most are as usual
        shown = {key: item for key, item in value.items() if key not in ("kind", "seed") and item is not None}
        inside = ", ".join(f"{key}={written(item)}" for key, item in shown.items() if key not in usual or item != usual[key])
        return f"{str(value.get('kind', '')).rpartition('.')[2]}({inside})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def events(group: Group) -> list[list[str]]:
    """Return what guards have undone and where alpha has risen again, in the order of `EVENTS`."""
    rows = []
    for method in group.methods:
        for run in method.runs:
            who = [method.label, str(run.run_info.seed)]
            for point in run.train_info.points:
                rows += [[*who, *_undone(event)] for event in point.events]
                if point.rises:
                    times = counted(max(point.rises.values()), "step")
                    rows.append(
                        [*who, f"until {point.step}", f"alpha rose in up to {times}", listed(list(point.rises), 3), NOTHING]
                    )
    return rows


def _undone(event: Mapping[str, Any]) -> list[str]:
    value, level, rate = (event.get(name) for name in ("value", "level", "rate"))
    size = "" if value is None else f" {significant(value)}"
    usual = "" if level is None else f", after {significant(level)}"
    back = f"back to step {event['restored']}" if "restored" in event else NOTHING
    slower = "" if rate is None else f", rate x {rate:g}"
    what = f"guard: {event.get('kind', 'restored')}{size}{usual}"
    return [str(event.get("step", NOTHING)), what, listed(event.get("sites") or [], 3), back + slower]


def provenance(results: Sequence[Result]) -> list[list[str]]:
    """Name command, commit, versions, hardware and time of the runs; what differs between them is listed."""
    if not results:
        return []
    metas = [result.meta_info for result in results]
    hours = sum(result.train_info.seconds for result in results)
    when = sorted(str(meta[name])[:10] for meta in metas for name in ("begun", "finished") if meta.get(name))
    span = " to ".join(dict.fromkeys([when[0], when[-1]])) if when else None
    rows = [
        ("Command", _different(meta.get("command") for meta in metas)),
        ("Commit", _different(str(meta["commit"])[:13] for meta in metas if meta.get("commit"))),
        ("Versions", _different(_versions(meta.get("versions")) for meta in metas)),
        ("Hardware", _different(_hardware(meta.get("hardware")) for meta in metas)),
        ("Trained", f"{span}, {duration(hours)} in all" if span else duration(hours)),
    ]
    return [[name, text] for name, text in rows if text]


def _different(values: Iterable[str | None]) -> str:
    return "; ".join(dict.fromkeys(value for value in values if value))


def _versions(versions: object) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) if isinstance(versions, dict) else ""


def _hardware(hardware: object) -> str:
    if not isinstance(hardware, dict):
        return str(hardware or "")
    gpus = [f"{count} x {name}" for name, count in Counter(hardware.get("gpus") or ()).items()]
    cores = f"{counted(hardware['cores'], 'core')}" if hardware.get("cores") else ""
    threads = f"{counted(hardware['threads'], 'thread')} a process" if hardware.get("threads") else ""
    machine = " ".join(str(hardware[name]) for name in ("system", "machine") if hardware.get(name))
    return ", ".join(part for part in (*gpus, machine, cores, threads) if part)
