"""Judges: what the committed results say of a claim, place by place, with five seeds or more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from experiments.evidence.arms import OUTSIDE
from experiments.evidence.measures import FINAL, Measure, Runs, work, work_ratio
from experiments.evidence.settings import SETTINGS
from segue.lab.report import table_one
from segue.reporting import records
from segue.reporting.formatting import flops, significant
from segue.reporting.records import Result
from segue.reporting.statistics import FEWEST, Interval, estimate, paired_difference, paired_ratio

Outcome = Literal["confirmed", "refuted", "open"]
ROOT = Path(__file__).parents[2]
RECIPES = "recipes"
ALONE, PROTOCOL = "alone", "one_rate"  # of any setting: runs that had the machine for themselves; the paper's protocol
FOLDERS = {  # of committed results, by setting
    RECIPES: ROOT / "experiments" / "recipes" / "results",
    **{name: ROOT / "experiments" / "evidence" / "results" / name for name in (*SETTINGS, ALONE, PROTOCOL)},
}


@dataclass(frozen=True)
class Place:
    """One group of one setting: within it, arms share teacher, data and length."""

    setting: str
    group: str
    arms: dict[str, Runs]

    @property
    def name(self) -> str:
        if self.setting in (ALONE, PROTOCOL):  # the group has the setting
            return self.group if self.setting == PROTOCOL else f"{self.group}, alone on the machine"
        setting = "digits (recipes)" if self.setting == RECIPES else self.setting
        return setting if self.group == "all" else f"{setting}, {self.group}"

    def has(self, *names: str) -> bool:
        """Whether each of these arms has enough seeds in common with the others."""
        seeds = [set(self.arms.get(name, ())) for name in names]
        return len(set.intersection(*seeds)) >= FEWEST

    @property
    def first(self) -> Result:
        """Any run: what all share is the same in each."""
        return next(iter(next(iter(self.arms.values())).values()))

    @property
    def teacher(self) -> float:
        """The teacher's score."""
        return self.first.train_info.teacher[self.first.train_info.score]

    @property
    def teacher_eval(self) -> float:
        """The teacher's score on the examples of the curves."""
        return self.first.train_info.teacher_eval[self.first.train_info.score]

    @property
    def re_initialised(self) -> bool:
        """Whether students are their teachers with new weights."""
        return bool(self.first.run_info.config["plan"]["student"]["kind"] == "students.Reinit")


@dataclass(frozen=True)
class Evidence:
    """All committed results."""

    places: tuple[Place, ...]

    @classmethod
    def read(cls, folders: dict[str, Path] = FOLDERS) -> Evidence:
        """Read what is there."""
        found = {name: records.read_all(folder) for name, folder in folders.items() if folder.is_dir()}
        return cls(tuple(place for name, results in found.items() for place in places_of(name, results)))

    @property
    def tuned(self) -> Evidence:
        """Without the paper's protocol, in which the arms are not tuned."""
        return Evidence(tuple(place for place in self.places if place.setting != PROTOCOL))

    def of(self, *arms: str, settings: Sequence[str] = ()) -> Iterator[Place]:
        """Yield the places that have these arms; times of runs beside others are in none of them."""
        for place in self.places:
            if place.has(*arms) and place.setting in (settings or set(FOLDERS) - {ALONE}):
                yield place


def places_of(setting: str, results: list[Result]) -> list[Place]:
    """Group results by group, arm and seed."""
    groups: dict[str, dict[str, Runs]] = {}
    for result in results:
        info = result.run_info
        group = info.group
        if setting in (ALONE, PROTOCOL):
            group = info.experiment if group == "all" else f"{info.experiment}, {group}"
        groups.setdefault(group, {}).setdefault(info.method, {})[info.seed] = result
    return [Place(setting, group, arms) for group, arms in groups.items()]


@dataclass(frozen=True)
class Finding:
    """What one place says."""

    place: str
    seeds: int
    outcome: Outcome
    text: str


Judge = Callable[[Evidence], list[Finding]]


def re_initialised(judge: Judge) -> Judge:
    """Judge only where students are their teachers with new weights."""
    return lambda evidence: judge(Evidence(tuple(place for place in evidence.places if place.re_initialised)))


def earlier(ours: str, theirs: str, *, fraction: float = 0.95, factor: float = 1.0, axis: str = "flops") -> Judge:
    """Claim: one arm holds a fraction of the teacher with less work than another, or than a factor of it."""

    def judge(evidence: Evidence) -> list[Finding]:
        settings = (ALONE,) if axis == "seconds" else ()
        places = evidence.of(ours, theirs, settings=settings)
        return [_earlier(place, ours, theirs, fraction, factor, axis) for place in places]

    return judge


def best_published(place: Place, ours: str, fraction: float = 0.95) -> str | None:
    """Return the arm from outside that holds a fraction of the teacher with the least work."""
    known = [name for name in OUTSIDE if place.has(ours, name)]
    return min(known, key=lambda name: sum(_until(run, fraction) for run in place.arms[name].values()), default=None)


def earlier_than_all_published(ours: str, *, fraction: float = 0.95, factor: float = 0.5) -> Judge:
    """Claim: one arm needs at most a factor of the work of the best arm from outside."""

    def judge(evidence: Evidence) -> list[Finding]:
        found = []
        for place in evidence.of(ours):
            if (best := best_published(place, ours, fraction)) is not None:
                found.append(_earlier(place, ours, best, fraction, factor, "flops"))
        return found

    return judge


def _until(run: Result, fraction: float) -> float:
    found = work(run, fraction)
    return found.spent if found.reached else 1e3 * found.spent  # never is later than late


def _earlier(place: Place, ours: str, theirs: str, fraction: float, factor: float, axis: str) -> Finding:
    mine, other = place.arms[ours], place.arms[theirs]
    seeds = sorted(mine.keys() & other.keys())
    reached = [sum(work(runs[seed], fraction).reached for seed in seeds) for runs in (mine, other)]
    ratio = work_ratio(mine, other, fraction, axis)
    counts = f"`{ours}` holds {100 * fraction:.0f} % in {reached[0]} of {len(seeds)} seeds, `{theirs}` in {reached[1]}"
    if ratio is None:
        later = reached[1] == len(seeds)  # theirs always gets there, ours not
        return Finding(place.name, len(seeds), "refuted" if later else "open", counts)
    bound = "at most " if reached[1] < len(seeds) else ""
    outcome: Outcome = "confirmed" if ratio["high"] < factor else "refuted" if ratio["low"] > factor and not bound else "open"
    return Finding(place.name, len(seeds), outcome, f"{bound}{_ratio(ratio)} times the work of `{theirs}`; {counts}")


def higher(ours: str, theirs: str, measure: Measure = FINAL) -> Judge:
    """Claim: one arm has more of a measure than another."""

    def judge(evidence: Evidence) -> list[Finding]:
        return [found for place in evidence.of(ours, theirs) if (found := _compared(place, ours, theirs, measure, _above))]

    return judge


def equal(ours: str, theirs: str, *, within: float, measure: Measure = FINAL, place: str = "") -> Judge:
    """Claim: two arms have the same of a measure, up to a margin that their interval must not leave; in all places, or one."""

    def verdict(low: float, high: float) -> Outcome:
        return "confirmed" if -within <= low and high <= within else "refuted" if low > 0 or high < 0 else "open"

    def judge(evidence: Evidence) -> list[Finding]:
        places = [one for one in evidence.of(ours, theirs) if one.name.startswith(place)]
        return [found for one in places if (found := _compared(one, ours, theirs, measure, verdict))]

    return judge


def _above(low: float, high: float) -> Outcome:
    return "confirmed" if low > 0 else "refuted" if high < 0 else "open"


def _compared(
    place: Place, ours: str, theirs: str, measure: Measure, verdict: Callable[[float, float], Outcome]
) -> Finding | None:
    mine, other = place.arms[ours], place.arms[theirs]
    seeds = sorted(mine.keys() & other.keys())
    found = paired_difference([(measure.read(mine[seed]), measure.read(other[seed])) for seed in seeds])
    if found is None or found.pairs < FEWEST:
        return None
    if found.half is None:  # equal differences: nothing to test
        return Finding(place.name, found.pairs, "open", f"{_signed(found.mean, measure)} over `{theirs}` in every seed")
    low, high = found.mean - found.half, found.mean + found.half
    values = " to ".join(_signed(end, measure, unit=False) for end in (low, high))
    return Finding(place.name, found.pairs, verdict(low, high), f"{_signed(found.mean, measure)} ({values}) over `{theirs}`")


def below(arm: str, measure: Measure, limit: float) -> Judge:
    """Claim: a measure of one arm is below a limit."""
    return _level(arm, measure, lambda low, high: "confirmed" if high < limit else "refuted" if low > limit else "open")


def above(arm: str, measure: Measure, limit: float) -> Judge:
    """Claim: a measure of one arm is above a limit."""
    return _level(arm, measure, lambda low, high: "confirmed" if low > limit else "refuted" if high < limit else "open")


def of_the_teacher(arm: str, fraction: float) -> Judge:
    """Claim: one arm ends with at least a fraction of the teacher's score."""

    def judge(evidence: Evidence) -> list[Finding]:
        return [
            found for place in evidence.of(arm) for found in above(arm, FINAL, fraction * place.teacher)(Evidence((place,)))
        ]

    return judge


def _level(arm: str, measure: Measure, verdict: Callable[[float, float], Outcome]) -> Judge:
    def judge(evidence: Evidence) -> list[Finding]:
        found = []
        for place in evidence.of(arm):
            value = estimate([measure.read(run) for run in place.arms[arm].values()])
            if value is not None and value.n >= FEWEST:
                half = value.half or 0.0
                text = f"{_number(value.mean, measure)} ± {_number(half, measure)}"
                found.append(Finding(place.name, value.n, verdict(value.mean - half, value.mean + half), text))
        return found

    return judge


def never(arm: str, fraction: float = 0.95) -> Judge:
    """Claim: one arm does not hold a fraction of the teacher in any seed."""

    def judge(evidence: Evidence) -> list[Finding]:
        found = []
        for place in evidence.of(arm):
            reached = [work(run, fraction) for run in place.arms[arm].values()]
            count, most = sum(one.reached for one in reached), max(one.spent for one in reached)
            outcome: Outcome = "refuted" if count == len(reached) else "open" if count else "confirmed"
            text = f"`{arm}` holds {100 * fraction:.0f} % in {count} of {len(reached)} seeds, at most {flops(most)} spent"
            found.append(Finding(place.name, len(reached), outcome, text))
        return found

    return judge


def cheaper(ours: str, theirs: str, *, factor: float = 1.0) -> Judge:
    """Claim: a run of one arm takes fewer operations than one of another, or at most a factor of them (counted, exact)."""

    def judge(evidence: Evidence) -> list[Finding]:
        found = []
        for place in evidence.of(ours, theirs):
            mine, other = place.arms[ours], place.arms[theirs]
            seeds = sorted(mine.keys() & other.keys())
            ratio = paired_ratio([(mine[seed].train_info.flops, other[seed].train_info.flops) for seed in seeds])
            if ratio is not None:
                text = f"{ratio['mean']:.3f} times the operations"
                found.append(Finding(place.name, len(seeds), "confirmed" if ratio["mean"] <= factor else "refuted", text))
        return found

    return judge


def table(method: str, aspect: table_one.Aspect) -> Judge:
    """Claim: a row of the paper's Table 1, in one column, judged as `segue report` does."""
    outcomes: dict[str, Outcome] = {"holds": "confirmed", "does not hold": "refuted", "open": "open"}

    def judge(evidence: Evidence) -> list[Finding]:
        found = []
        for place in evidence.of(method):
            runs = list(place.arms[method].values())
            row = table_one.measure(runs, runs[0].train_info.sites)
            verdict = aspect.verdict(row, aspect.claims[method])
            if verdict in outcomes:
                found.append(Finding(place.name, len(runs), outcomes[verdict], aspect.measured(row)))
        return found

    return judge


@dataclass(frozen=True)
class Verdict:
    """What all places together say of a claim."""

    outcome: str
    findings: list[Finding] = field(default_factory=list)


def summed(parts: Sequence[list[Finding]]) -> Verdict:
    """Sum up the findings of all places and of all parts of a claim: one outcome if nothing contradicts it."""
    findings = [finding for part in parts for finding in part]
    if not findings:
        return Verdict("not measured yet")
    outcomes = {finding.outcome for finding in findings}
    if {"confirmed", "refuted"} <= outcomes:
        return Verdict("mixed", findings)
    outcome = min(outcomes, key=("confirmed", "refuted", "open").index)
    return Verdict(outcome if len(outcomes) == 1 and all(parts) else f"{outcome} in part", findings)


def _ratio(found: Interval) -> str:
    return f"{significant(found['mean'])} ({significant(found['low'])} to {significant(found['high'])})"


def _signed(value: float, measure: Measure, *, unit: bool = True) -> str:
    return f"{100 * value:+.1f}{' points' if unit else ''}" if measure.percent else f"{value:+.3g}"


def _number(value: float, measure: Measure) -> str:
    return f"{100 * value:.1f} %" if measure.percent else f"{value:.3g}"
