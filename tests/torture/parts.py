"""The parts of a campaign, in the order of the table."""

from __future__ import annotations

from tests.torture.campaign import Part

PARTS = [
    Part(
        "killed trainings",
        3,
        "kills:trainings",
        "`fit` in eleven settings, killed up to four times: by SIGKILL, SIGTERM or SIGINT at any moment, before any operation "
        "on a file, or by the system within a write. It resumes at its latest complete checkpoint and ends bit for bit as an "
        "undisturbed one: weights, optimizer, random states, metrics.",
    ),
    Part(
        "killed grids",
        3,
        "kills:grids",
        "`segue grid` with two workers, killed itself or one of its workers; the results are those of an undisturbed one.",
    ),
    Part(
        "killed conversions",
        3,
        "kills:conversions",
        "`segue convert` of a tiny Llama, killed as `fit` is; the folder is that of an undisturbed conversion, bit for bit.",
    ),
    Part(
        "two processes",
        1.5,
        "two_processes:attempts",
        "two trainings that want one folder, one of them killed; two processes that train together, one of them killed. Nobody "
        "waits forever, and what is left resumes bit for bit.",
    ),
    Part(
        "damaged and forged checkpoints",
        2,
        "checkpoint_files:attempts",
        "files with flipped bits, cut, swapped, replaced by pickles, folders, FIFOs and devices; and files with right hashes "
        "and wrong content: other types, shapes and names, NaN, huge numbers, deep nesting, paths that lead outside.",
    ),
    Part(
        "damaged and forged converted folders",
        2,
        "converted_files:attempts",
        "the same for folders of `segue convert`, and configurations that would choose code, next to a stand-in for `kernels` "
        "that records calls. Nothing is executed, and nothing outside of the folder is written.",
    ),
    Part(
        "wrong calls",
        2.5,
        "wrong_input:calls",
        "every public callable with one wrong argument: a list of values for every parameter, and values that hypothesis "
        "generates from the type hints.",
    ),
    Part(
        "wrong commands",
        3,
        "wrong_input:commands",
        "every command with a wrong option, setting or damaged file.",
    ),
    Part(
        "non-finite values",
        1.5,
        "nonfinite_values:attempts",
        "inf and NaN in inputs, the loss, weights, buffers, moments, gradients, teachers, students, the backbone, gates and "
        "schedules, with `on_nan` of both kinds. The error names the place, or the step is left out bit for bit; no checkpoint "
        "holds them.",
    ),
    Part(
        "full disk",
        1,
        "full_disk:attempts",
        "a small tmpfs, or ENOSPC from writes, fsync and opening: the last checkpoint stays, and with space the training ends "
        "bit for bit as an undisturbed one.",
    ),
    Part(
        "long runs",
        4,
        "long_run:attempts",
        "10,000 steps (fewer in a short campaign) by `fit` or a loop of one's own: nothing grows, and a stop in the middle "
        "changes no bit of the end.",
    ),
]
