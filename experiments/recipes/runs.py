"""Which recipe recovers most of the teacher, and how soon: a twelve-block ViT on 320 digits, attention re-initialised.

Command:  segue tune experiments/recipes --workers 2 --trials 8 --steps-share 0.5
          segue grid experiments/recipes --workers 2 --tuned experiments/recipes/tuned.json    (or your own, runs/recipes_tune)
          segue report runs/recipes    (or experiments/recipes/results, without any training)
Runtime:  some 25 minutes for the trials, 30 for the grid, on two cores with one thread each.
Expected: local fits of many updates hold 95 % of the teacher at the first evaluation; student-only training never does.
Runtime:  a run takes 25 (student-only) to 34 seconds of one core; 60 runs, after 96 trials of the search.
Expected: teacher 0.958. Untuned, one seed: student-only 0.830, DCR + DFG 0.948, local fit 20 % + DCR + DFG + KL 0.956.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from experiments.evidence.arms import Arm, fitted, phased
from segue import methods
from segue.data.digits import Digits
from segue.lab.config import Run, Stage, Teacher
from segue.lab.models import SmallViT
from segue.lab.presets import Preset
from segue.lab.tasks import ImageTask
from segue.lab.variants import Variant
from segue.losses import LogitDistillation
from segue.phases import Phase
from segue.schedules import Adaptive, aggr20
from segue.training.recipe import Recipe

REFERENCE = "student_only"  # what every recipe must beat
IMAGES = 0.248  # of 1,297: 320 images, 32 of each class
TENTHS = 10  # evaluations, at even distances


DCR_DFG = Phase(name="handover", schedule=aggr20())  # the guidance falls with alpha
RAMP = Phase(name="handover", schedule=aggr20(), guidance=0.0, lr=1e-3)
ADAPTIVE = Phase(name="handover", schedule=Adaptive())  # the guidance falls with alpha, which falls as the interface allows
JUMP = Phase(name="students alone", lr=1e-3)
OWN = {"lr": 4e-3, "weight_decay": 0.0}  # of a local fit with many updates

ARMS = (
    Arm("student_only", "Student only", 5e-4, methods.student_only),
    Arm("distillation", "KL + CE", 1e-3, methods.distillation),
    Arm("dcr_dfg", "DCR + DFG", 4e-3, methods.dcr_dfg),
    Arm("dcr_dfg_kl", "DCR + DFG + KL", 4e-3, partial(methods.dcr_dfg, distill=LogitDistillation())),
    Arm("halo_50", "Local fit 50 %, jump (HALO's shape)", 4e-3, partial(methods.halo, hold=0.5)),
    Arm("fit_dcr_dfg_kl", "Local fit 20 %, then DCR + DFG + KL", 4e-3, fitted(0.2, DCR_DFG)),
    Arm("fit_8_ramp", "Local fit 20 % x 8, ramp", 1e-3, fitted(0.2, RAMP, reuse=8, **OWN)),
    Arm("fit_8_jump", "Local fit 20 % x 8, jump", 1e-3, fitted(0.2, JUMP, reuse=8, **OWN)),
    Arm("fit_4x4_jump", "Local fit 20 % x 4 of 4 parts, jump", 1e-3, fitted(0.2, JUMP, split=4, reuse=4, **OWN)),
    Arm("fit_4x4_10_jump", "Local fit 10 % x 4 of 4 parts, jump", 1e-3, fitted(0.1, JUMP, split=4, reuse=4, **OWN)),
    Arm("adaptive_dfg_kl", "Adaptive + DFG + KL", 4e-3, phased(ADAPTIVE)),
    Arm("fit_adaptive_kl", "Local fit 10 % x 4 of 4 parts, adaptive", 1e-3, fitted(0.1, ADAPTIVE, split=4, reuse=4, **OWN)),
)


def preset(steps: int = 500) -> Preset:
    """Return what all arms share."""
    task = ImageTask(source=Digits(), model=SmallViT(depth=12))
    stage = Stage(recipe=Recipe(steps=500, lr=3e-3, warmup=0.1))
    return Preset(
        name="recipes",
        task=task,
        teacher=Teacher(task=task, stages=(stage,), batch=64),
        recipe=Recipe(steps=steps, warmup=0.05),
        batch=64,
        evaluations=TENTHS,
        data_fraction=IMAGES,
        diagnostics=(),
    )


def runs(seeds: int = 5, steps: int = 500, only: str = "") -> list[Run]:
    """Return arms x seeds; the seed varies slowest, so that an interrupted grid has complete seeds."""
    shared = preset(steps)
    return [
        replace(run, recipe=replace(run.recipe, lr=arm.lr), evaluations=TENTHS)
        for seed in range(seeds)
        for arm in ARMS
        if only in arm.name
        for run in [shared.run(Variant(arm.name, arm.label, arm.plan), seed=seed)]
    ]
