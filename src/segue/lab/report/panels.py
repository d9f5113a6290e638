"""Panels: what every figure shows, as data, before it is drawn."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from segue.lab.report.curves import Curve, Line
from segue.lab.report.summary import Group, Method, Summary
from segue.reporting.formatting import shortened, work_unit
from segue.reporting.palette import LineStyle


@dataclass(frozen=True)
class Drawn:
    """One curve of a panel."""

    label: str
    style: LineStyle
    x: Sequence[float]
    mean: Sequence[float | None]
    half: Sequence[float | None]
    faint: bool = False  # a second curve of the same method
    marks: Sequence[float] = ()  # where the guard has restored a state


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: list[Drawn]
    reference: float | None = None
    reference_name: str = "teacher"
    log: bool = False
    bottom: float | None = None
    limits: tuple[float, float] | None = None
    ticks: list[str] | None = None  # names along x in place of numbers


@dataclass(frozen=True)
class GroupPanels:
    """The panels of one group, in the styles of its methods."""

    group: Group
    style_of: dict[str, LineStyle]

    def drawn(
        self, x: Callable[[Line], Sequence[float]], y: Callable[[Method], Curve], times: float = 1.0, *, faint: bool = False
    ) -> list[Drawn]:
        """Return one curve of every method that has it."""
        found = []
        for method in self.group.methods:
            curve, along = y(method), x(method.line)
            if curve.known:
                marks = () if faint or len(along) != len(method.line.step) else method.line.marks(along)
                means, halves = _scaled(curve.mean, times), _scaled(curve.half, times)
                found.append(Drawn(method.label, self.style_of[method.method], along, means, halves, faint, marks))
        return found

    def at_sites(self, quantity: str, y_label: str, *, log: bool = False) -> list[Panel]:
        """Show one quantity at the first, a middle and the last site."""
        return [
            Panel(
                shortened(self.group.sites[index], 42),
                "epoch",
                y_label,
                self.drawn(lambda line: line.epoch, lambda method, s=self.group.sites[index]: method.line.by_site[quantity][s]),  # type: ignore[misc]
                log=log,
            )
            for index in self.group.shown_sites
        ]

    def by_depth(self, title: str, y_label: str, read: Callable[[Method], Curve]) -> Panel:
        """Show one number per site."""
        places = range(len(self.group.sites))
        lines = self.drawn(lambda _: places, read)
        return Panel(title, "site, in the order of depth", y_label, lines, log=True, ticks=[str(i) for i in places])

    def by_progress(self, y_label: str, quantity: str, *, title: str = "", faint: bool = False, until: float = 1.0) -> Panel:
        """Show one quantity of the model over the training, or over its beginning."""
        lines = self.drawn(lambda line: line.progress, lambda method: method.line.overall[quantity], faint=faint)
        return Panel(title, "training progress", y_label, [_cut(line, until) for line in lines])


def group_figures(group: Group, summary: Summary, style_of: dict[str, LineStyle]) -> dict[str, list[Panel]]:
    """Return the panels of every figure of one group."""
    make = GroupPanels(group, style_of)
    return {
        "cosine": _on_one_scale(make.at_sites("cosine", "interface cosine")),
        "accuracy": _accuracy(make, summary),
        "schedules": [make.by_progress("alpha", "alpha")],
        "alphas": _on_one_scale(make.at_sites("alphas", "alpha")) if _differ_by_site(group) else [],
        "gradient_norm": make.at_sites("gradient_norm", "gradient norm", log=True),
        "drift": make.at_sites("drift_blend", "drift", log=True),
        "depth": [
            make.by_depth("gradient norm, mean over the first fifth", "gradient norm", lambda method: method.early_gradient),
            make.by_depth("drift of the blend, mean over the first fifth", "drift", lambda method: method.early_drift),
            make.by_depth("drift of the students alone, at the end", "drift", lambda method: method.last_drift),
        ],
        **_table_one(make),
    }


def _differ_by_site(group: Group) -> bool:
    """Tell whether a method gives its sites alphas of their own: the mean shows all of it otherwise."""
    by_site = [[curve.mean for curve in method.line.by_site["alphas"].values()] for method in group.methods]
    return any(means != means[:1] * len(means) for means in by_site)


def _accuracy(make: GroupPanels, summary: Summary) -> list[Panel]:
    times, percent = (100.0, " (%)") if summary.score_format.percent else (1.0, "")
    group = make.group
    most = max((method.line.flops[-1] for method in group.methods if method.line.flops), default=0.0)
    unit, name = work_unit(most)

    def of(side: str, title: str) -> Panel:
        return Panel(
            title,
            f"work ({name})",
            f"{group.score}{percent}",
            make.drawn(lambda line: [value / unit for value in line.flops], lambda method: method.line.overall[side], times),
            None if group.teacher_eval is None else times * group.teacher_eval,
            bottom=0.0 if summary.score_format.percent else None,
        )

    return [of("students", "students alone"), of("blend", "blend, teachers included")]


def _table_one(make: GroupPanels) -> dict[str, list[Panel]]:
    def bounded(title: str, y_label: str, name: str) -> Panel:
        panel = make.by_depth(title, y_label, lambda method: method.table_one.by_depth[name])
        return replace(panel, reference=1.0, reference_name="bound")

    end = make.group.anneal_end
    gates = make.by_progress("variance", "gate_variance", title="by gates; thin and dotted: by minibatches", until=end)
    data = make.by_progress("variance", "data_variance", faint=True, until=end)
    return {
        "gate_variance": [replace(gates, lines=[*gates.lines, *data.lines], log=True)] if gates.lines else [],
        "variance_depth": [
            make.by_depth(
                "gate-induced variance, mean over the handover",
                "variance",
                lambda method: method.table_one.by_depth["gate_variance"],
            )
        ],
        "bounds": [
            bounded("curvature bias of the loss, mean over the handover", "bias / bound", "curvature"),
            bounded("rise of the loss along the path, mean over the handover", "rise / bound", "path"),
        ],
    }


def _on_one_scale(panels: list[Panel]) -> list[Panel]:
    """Give panels that are compared the same limits."""
    means = [mean for panel in panels for line in panel.lines for mean in line.mean if mean is not None]
    low, high = min([0.0, *means]), max([0.0, *means])
    margin = 0.06 * (high - low or 1.0)
    return [replace(panel, limits=(low - margin, high + margin)) for panel in panels]


def _cut(line: Drawn, until: float) -> Drawn:
    shown = bisect_right(line.x, until)
    return replace(line, x=line.x[:shown], mean=line.mean[:shown], half=line.half[:shown])


def _scaled(values: Sequence[float | None], times: float) -> list[float | None]:
    return [None if value is None else times * value for value in values]
