"""The ledger of claims: the paper's and our own, each judged by the committed results.

Command:  python -m experiments.evidence.claims    (writes docs/claims.md)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.evidence import judges
from experiments.evidence.judges import (
    ALONE,
    FOLDERS,
    PROTOCOL,
    RECIPES,
    ROOT,
    Evidence,
    Judge,
    Verdict,
    above,
    below,
    cheaper,
    earlier,
    earlier_than_all_published,
    equal,
    higher,
    never,
    of_the_teacher,
    re_initialised,
    summed,
)
from experiments.evidence.measures import COSINE, COSINES, DEEPER, DRIFT, GATES, GRADIENT, SWAPPED, TENTH, VARIANCE
from segue.lab.report import table_one
from segue.lab.report.tables import escaped

PAGE = ROOT / "docs" / "claims.md"
POINT = 0.01  # the margin of "equal": a point of accuracy


@dataclass(frozen=True)
class Claim:
    """One line of the ledger."""

    text: str
    source: str
    test: str  # which arms and which measure, in words
    judge: Judge | tuple[Judge, ...] = ()  # none: by the tests that `test` names, or not at all
    untestable: str = ""  # why it cannot be judged here

    def verdict(self, evidence: Evidence) -> Verdict:
        """Judge the claim."""
        if self.untestable:
            return Verdict("not testable here")
        parts = self.judge if isinstance(self.judge, tuple) else (self.judge,)
        return summed([judge(evidence) for judge in parts]) if parts else Verdict("confirmed by tests")


ABSTRACT, THEORY, GUIDANCE, EXPERIMENTS, TABLE = "abstract", "3.2", "3.3", "4", "Table 1"
GATED = ("theseus", "theseus_gumbel")

PAPER = (
    Claim(
        "Cold-start re-initialisation destabilises frozen backbones.",
        ABSTRACT,
        "the students before any training keep less than half of the teacher's score",
        re_initialised(below("student_only", SWAPPED, 0.5)),
    ),
    Claim(
        "DCR eliminates the gradient variance that stochastic gates cause.",
        ABSTRACT,
        "the gates' part of the variance is below 0.001 with DCR and above a tenth with Theseus",
        (below("dcr", GATES, 1e-3), above("theseus", GATES, 0.1)),
    ),
    *(
        Claim(
            f"DCR converges faster than {what}.",
            ABSTRACT,
            f"operations until 95 % is held, `dcr` against `{arm}`",
            earlier("dcr", arm),
        )
        for arm, what in (
            ("theseus", "stochastic gating (a coin)"),
            ("theseus_gumbel", "stochastic gating (a soft coin)"),
            ("distillation", "distillation"),
        )
    ),
    *(
        Claim(
            f"DCR aligns better than {what}.",
            ABSTRACT,
            f"interface cosine at the end, mean over sites, `dcr` against `{arm}`",
            higher("dcr", arm, COSINE),
        )
        for arm, what in (("theseus", "stochastic gating"), ("distillation", "distillation"))
    ),
    Claim(
        "Proposition 1: the variance of a coin's gradient has a part that the gate causes.",
        THEORY,
        "tests/diagnostics/test_gradient_variance.py; docs/theory.md has what the proof assumes",
    ),
    Claim(
        "Proposition 2: a deterministic gate has no such part.",
        THEORY,
        "tests/diagnostics/test_gradient_variance.py, exactly; over training: the gates' part with DCR below 0.001",
        below("dcr", GATES, 1e-3),
    ),
    Claim(
        "Strictly lower gradient variance than stochastic gating.",
        THEORY,
        "variance by gates and minibatches over the handover, `theseus` above `dcr`",
        higher("theseus", "dcr", VARIANCE),
    ),
    Claim(
        "Any stochastic gate has an extra, non-negative term of variance.",
        THEORY,
        "the gates' part with Theseus-Gumbel above a tenth",
        above("theseus_gumbel", GATES, 0.1),
    ),
    Claim(
        "Proposition 3: random mixing before a curved loss is biased, DCR's path is not.",
        THEORY,
        "tests/diagnostics/test_curvature.py",
    ),
    Claim("Proposition 4: the loss path is bounded by Lipschitz continuity.", THEORY, "tests/diagnostics/test_loss_path.py"),
    Claim(
        "Deterministic blending gives a better-conditioned optimisation path.",
        THEORY,
        "",
        untestable="the paper defines no measure of it; its consequences are the lines on speed and variance",
    ),
    Claim(
        "The guidance adds near-zero cost: no additional forward.",
        GUIDANCE,
        "operations of a run, `dcr_dfg` at most 1.01 times `dcr`",
        cheaper("dcr_dfg", "dcr", factor=1.01),
    ),
    Claim(
        "Distillation needs a full pass of the teacher, DCR + DFG does not.",
        GUIDANCE,
        "operations of a run, `dcr_dfg` at most 0.9 times `distillation`",
        cheaper("dcr_dfg", "distillation", factor=0.9),
    ),
    Claim(
        "DCR's overhead grows with the number of replaced modules; that of distillation does not depend on it.",
        GUIDANCE,
        "tests/core/test_counted_cost.py",
    ),
    *(
        Claim(
            f"{label} has a higher interface cosine than stochastic baselines ({what}), at blocks 0, 7 and 11.",
            EXPERIMENTS,
            f"interface cosine at the end at three sites, `{arm}` against `{other}`",
            tuple(higher(arm, other, measure) for measure in COSINES),
        )
        for arm, label in (("dcr", "DCR"), ("dcr_dfg", "DCR + DFG"))
        for other, what in zip(GATED, ("a coin", "a soft coin"), strict=True)
    ),
    Claim(
        "The gain in cosine is largest in middle and late blocks.",
        EXPERIMENTS,
        "cosine at the last site minus the first, `dcr` against `theseus`",
        higher("dcr", "theseus", DEEPER),
    ),
    Claim(
        "Later layers learn earlier: gates starve deep layers of gradients.",
        EXPERIMENTS,
        "gradient norm in the first fifth, `dcr` against `theseus`",
        higher("dcr", "theseus", GRADIENT),
    ),
    Claim(
        "With DCR the blocks receive in-distribution features from the start.",
        EXPERIMENTS,
        "drift of the residual stream in the first fifth, smaller with `dcr` than with `theseus` and `student_only`",
        (higher("theseus", "dcr", DRIFT), higher("student_only", "dcr", DRIFT)),
    ),
    *(
        Claim(
            f"DCR variants reach the target sooner in {what}.",
            EXPERIMENTS,
            f"{what} until 95 % is held, `dcr` and `dcr_dfg` against `theseus` and `distillation`",
            tuple(earlier(arm, other, axis=axis) for arm in ("dcr", "dcr_dfg") for other in ("theseus", "distillation")),
        )
        for axis, what in (("epoch", "epochs"), ("seconds", "wall-clock time"))
    ),
    Claim(
        "Final accuracies are similar.",
        EXPERIMENTS,
        "final score, `dcr_dfg` within a point of `theseus`, `distillation` and `student_only`",
        tuple(equal("dcr_dfg", other, within=POINT) for other in ("theseus", "distillation", "student_only")),
    ),
    Claim(
        "They are about 78 to 80 % (ViT-S/16 on CIFAR-100).",
        EXPERIMENTS,
        "",
        untestable="no GPU, and no weights pretrained on ImageNet; `segue grid experiments/paper` is the experiment",
    ),
    Claim(
        "Adding DFG accelerates the takeover.",
        EXPERIMENTS,
        "operations until 95 % is held, `dcr_dfg` against `dcr`",
        earlier("dcr_dfg", "dcr"),
    ),
    Claim(
        "The guidance gains most in deeper blocks.",
        EXPERIMENTS,
        "cosine at the last site minus the first, `dcr_dfg` against `dcr`",
        higher("dcr_dfg", "dcr", DEEPER),
    ),
    *(
        Claim(
            f"DCR + DFG outperforms {what}.",
            "conclusion",
            f"final score, `dcr_dfg` against `{arm}`",
            higher("dcr_dfg", arm),
        )
        for arm, what in (
            ("theseus", "stochastic gating (a coin)"),
            ("theseus_gumbel", "stochastic gating (a soft coin)"),
            ("distillation", "distillation"),
        )
    ),
    *(
        Claim(
            f"{label}: {aspect.heading[0].lower()}{aspect.heading[1:]} is “{aspect.claims[method]}”.",
            TABLE,
            "as `segue report` judges Table 1",
            judges.table(method, aspect),
        )
        for aspect in table_one.ASPECTS
        for method, label in (("distillation", "Distillation"), ("theseus", "Theseus"), ("dcr", "DCR"))
    ),
)

OURS = (
    Claim(
        "The shipped recipe holds 95 % of the teacher at half the operations of the best published method, or fewer.",
        "the goal",
        "operations until 95 % is held, `local_fit` against the best of all published arms, each tuned alike",
        earlier_than_all_published("local_fit"),
    ),
    Claim(
        "By a local fit, students hold 95 % of the teacher earlier than by DCR + DFG.",
        "README, results",
        "operations until 95 % is held, `local_fit` against `dcr_dfg`",
        earlier("local_fit", "dcr_dfg"),
    ),
    Claim(
        "... and earlier than HALO's shape, also at 99 %.",
        "results",
        "operations until 95 and 99 % is held, `local_fit` against `halo`",
        (earlier("local_fit", "halo"), earlier("local_fit", "halo", fraction=0.99)),
    ),
    *(
        Claim(f"{label} never gets to 95 % of the teacher.", "README, results", f"`{arm}`", never(arm))
        for arm, label in (("student_only", "Swap and train"), ("distillation", "KL distillation"))
    ),
    Claim(
        "With little data, DCR + DFG ends above swap and train.",
        "README",
        "final score, `dcr_dfg` against `student_only`",
        higher("dcr_dfg", "student_only"),
    ),
    Claim(
        "In the first tenth of a run swap and train is ahead of DCR + DFG, if weights are new.",
        "README, results",
        "score after a tenth of the run, attention re-initialised",
        re_initialised(higher("student_only", "dcr_dfg", TENTH)),
    ),
    Claim(
        "The guidance does most of the work, with any gate.",
        "README, results",
        "final score, `gumbel_dfg` above `dcr`, and within a point of `dcr_dfg`",
        (higher("gumbel_dfg", "dcr"), equal("gumbel_dfg", "dcr_dfg", within=POINT)),
    ),
    Claim(
        "Guidance aligns the outputs, not the blend.",
        "results",
        "interface cosine at the last site, `gumbel_dfg` against `dcr`",
        higher("gumbel_dfg", "dcr", COSINES[2]),
    ),
    Claim(
        "A local fit ends above DCR + DFG, KL and swap and train, with new weights and with copied projections.",
        "which-method",
        "final score, `local_fit` against `dcr_dfg`, `distillation` and `student_only`",
        tuple(higher("local_fit", arm) for arm in ("dcr_dfg", "distillation", "student_only")),
    ),
    Claim(
        "With copied projections all methods end equal.",
        "earlier pages",
        "final score, `dcr_dfg` and `local_fit` within a point of `student_only` (minilm, linear attention)",
        tuple(equal(arm, "student_only", within=POINT, place="minilm, Linear attention") for arm in ("dcr_dfg", "local_fit")),
    ),
    Claim(
        "After a good fit the way of taking over does not matter.",
        "results",
        "final score, `local_fit` (a jump) within a point of `fit_adaptive` and of `fit_ramp`",
        (equal("local_fit", "fit_adaptive", within=POINT), equal("local_fit", "fit_ramp", within=POINT)),
    ),
    Claim(
        "Adaptive alone is not better than the paper's schedule with the same losses.",
        "results",
        "final score, `dcr_dfg_kl` against `adaptive_dfg_kl`",
        higher("dcr_dfg_kl", "adaptive_dfg_kl"),
    ),
    Claim(
        "A single rate for two phases is bad.",
        "results",
        "final score, `dcr_dfg_kl` against a fit at the same rate before it (`fit_dcr_dfg_kl`)",
        higher("dcr_dfg_kl", "fit_dcr_dfg_kl"),
    ),
    Claim(
        "A student that can imitate its teacher needs hardly any labels.",
        "cards/local_fit",
        "a local fit alone (`fit_only`) ends above 95 % of the teacher's score",
        of_the_teacher("fit_only", 0.95),
    ),
    Claim(
        "A guidance that stays after takeover works against the task.",
        "cards/guidance",
        "final score, `local_fit` against `local_fit_floor`",
        higher("local_fit", "local_fit_floor"),
    ),
    Claim(
        "A complete run of DCR + DFG costs at most 1.1 times swap and train.",
        "README, performance",
        "operations of a run",
        cheaper("dcr_dfg", "student_only", factor=1.1),
    ),
    Claim(
        "In a diffusion transformer, DCR with guidance and distillation loses for three of four students.",
        "results",
        "tests/experiments/test_dit.py: the table is that of the committed results",
    ),
    Claim(
        "98.0 % by a local fit, 97.7 % by a blend, 84.4 % by swap and train (the picture of README).",
        "README",
        "tests/docs/test_readme.py",
    ),
    Claim(
        "Weight 0 is the teacher bit for bit, weight 1 the student.",
        "README, guarantees",
        "tests/core/test_seam.py, tests/core/test_precision.py",
    ),
    Claim(
        "A call that fails leaves the model as it was.",
        "README, guarantees",
        "tests/core/test_transaction.py, tests/training/test_undo.py",
    ),
    Claim(
        "A run stopped at any step resumes bit for bit.",
        "README, guarantees",
        "tests/checkpoint/test_state.py, tests/training/test_fit.py",
    ),
    Claim(
        "No pickle is executed on load.",
        "README, guarantees",
        "tests/checkpoint/test_state.py, tests/convert/test_pretrained.py",
    ),
    Claim(
        "After the handover the model costs what a plain model costs.",
        "README, guarantees",
        "tests/core/test_counted_cost.py, tests/core/test_compile.py",
    ),
)


def markdown(evidence: Evidence) -> str:
    """Write the page."""
    lines = [
        "# Claims",
        "",
        "Every claim of the paper's abstract, sections 3.2, 3.3, 4 and Table 1, and every measured claim of our own, judged by "
        "the committed results.",
        "`python -m experiments.evidence.claims` writes this page; its numbers come from those results and nowhere else.",
        "",
        "A line is judged in each setting that has its arms with five seeds, by a 95 % interval over them (Student's t; of "
        "ratios, for their logarithm), not adjusted for the number of lines. *Open*: the interval contains the limit. "
        "*Mixed*: confirmed in one setting and refuted in another; *in part*: another part of the line is open or not measured "
        "yet. The paper's claims are also judged with the paper's protocol (*one rate for all*), ours only with tuned arms. "
        "Work is counted in operations, teachers included, "
        "until the students alone hold 95 % of the teacher; a run that never does counts with all it spent.",
        "",
        "What [performance](performance.md), [models](models.md), [reliability](reliability.md) and "
        "[guarantees](guarantees.md) say is judged on these pages, by the commands and tests that they name.",
        "",
        *_counts(evidence),
        "",
        "## The paper",
        "",
        *_table(PAPER, evidence),
        "",
        "## Segue",
        "",
        *_table(OURS, evidence.tuned),
        "",
        "## Where the numbers come from",
        "",
        *_sources(evidence),
        "",
        "[What is run for it, in which order and for how long](../experiments/evidence/README.md).",
        "",
    ]
    return "\n".join(lines)


def _counts(evidence: Evidence) -> list[str]:
    judged = {
        "the paper": [claim.verdict(evidence).outcome for claim in PAPER],
        "Segue": [claim.verdict(evidence.tuned).outcome for claim in OURS],
    }
    names = sorted({outcome for outcomes in judged.values() for outcome in outcomes})
    lines = ["| | " + " | ".join(("claims", *names)) + " |", "|---|" + "---|" * (len(names) + 1)]
    for what, outcomes in judged.items():
        counts = Counter(outcomes)
        lines.append(f"| {what} | {len(outcomes)} | " + " | ".join(str(counts[name] or "") for name in names) + " |")
    return lines


def _table(claims: Sequence[Claim], evidence: Evidence) -> list[str]:
    lines = ["| claim | where | tested by | outcome | measured |", "|---|---|---|---|---|"]
    for claim in claims:
        verdict = claim.verdict(evidence)
        parts = [f"{one.place} ({one.seeds} seeds): {one.text}" for one in verdict.findings]
        cells = (claim.text, claim.source, claim.untestable or claim.test, f"**{verdict.outcome}**", ". ".join(parts))
        lines.append("| " + " | ".join(escaped(cell).replace("\\`", "`") for cell in cells) + " |")
    return lines


def _sources(evidence: Evidence) -> list[str]:
    lines = ["| setting | group | runs | seeds | tables and figures | trained by |", "|---|---|---|---|---|---|"]
    for place in evidence.places:
        folder = FOLDERS[place.setting].relative_to(ROOT).as_posix()
        command = f"segue grid experiments/evidence -o setting={place.first.run_info.experiment}"
        if place.setting == RECIPES:
            command = "segue grid experiments/recipes"
        elif place.setting == ALONE:
            command += " -o alone=true"
        elif place.setting == PROTOCOL:
            command += " -o one_rate=FILE"
        seeds = {len(runs) for runs in place.arms.values()}
        count = sum(len(runs) for runs in place.arms.values())
        lines.append(f"| {place.setting} | {place.group} | {count} | {min(seeds)} | `segue report {folder}` | `{command}` |")
    return lines


def main() -> None:
    PAGE.write_text(markdown(Evidence.read()), encoding="utf-8")
    print(Path(PAGE).relative_to(ROOT))


if __name__ == "__main__":
    main()
