"""Try every student on every model: docs/models.md, and an exit code.

    make matrix                                          all of it, two entries at a time; resumes; writes docs/models.md
    .venv/bin/python -m tests.matrix --only llama timm   the entries whose names contain one of these; writes no page
    .venv/bin/python -m tests.matrix --only swin --keep  the same, and puts them into the kept record and the page
    .venv/bin/python -m tests.matrix --show              the table of a run that goes on, or was stopped
    .venv/bin/python -m tests.matrix --fresh             from the beginning, although nothing has changed

The record of a run is runs/matrix/record.jsonl, one line for every cell. A run continues where it was stopped, as long as
Segue, the matrix and the packages are the same, and starts again otherwise. When all is known it is kept as
tests/matrix/record.jsonl, from which the page and the share in README are made. The command fails if anything crashed after
it was accepted, or is silently wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.helpers import processes
from tests.helpers.processes import ROOT
from tests.matrix import page, record
from tests.matrix.cells import BAD, STUDENTS
from tests.matrix.entries import Entry, all_entries
from tests.matrix.running import run_entry

AT_ONCE = 2  # entries
PRELOADED = (  # what every process would import for itself
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "timm",
    "diffusers.models.attention_processor",
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Try every student on every model.")
    parser.add_argument("--only", nargs="+", default=[], help="Words in the names of entries; the page is then not written.")
    parser.add_argument("--students", nargs="+", default=[], help="Names of students; the page is then not written.")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "matrix", help="Folder of the record.")
    parser.add_argument("--show", action="store_true", help="Show the table of the record as it is.")
    parser.add_argument("--keep", action="store_true", help="Put the entries of --only into the kept record and the page.")
    parser.add_argument("--fresh", action="store_true", help="Start again.")
    options = parser.parse_args()
    if options.keep and (options.students or options.show):
        parser.error("--keep needs every student of its entries, and a run: leave --students and --show out")

    chosen = [entry for entry in all_entries().values() if not options.only or any(word in entry.name for word in options.only)]
    names = [student.name for student in STUDENTS if not options.students or student.name in options.students]
    partial = bool(options.only or options.students)
    running = record.Running(options.out / ("some.jsonl" if partial and not options.show else "record.jsonl"))
    if not options.show:
        running.begin(fresh=options.fresh or partial)
        _run(chosen, names, running)
    head, cells = running.read()
    wanted = {entry.name for entry in chosen}
    cells = [cell for cell in cells if cell["entry"] in wanted and cell["student"] in names]
    print(page.counts(cells))
    share = page.share_text({entry.name for entry in chosen if entry.has_softmax}, cells)
    print(f"LinearAttention and SlidingWindow both go into {share}.")
    bad = [cell for cell in cells if cell["outcome"] in BAD]
    for cell in bad:
        print(f"{cell['outcome']}: {cell['entry']}: {cell['student']}: {cell['stage']}: {cell['detail']}")
    if options.keep or not (partial or options.show):
        softmax = {entry.name: entry.has_softmax for entry in chosen}
        if partial:
            record.renew(record.KEPT, head, cells, softmax)
        else:
            record.keep(record.KEPT, head, cells, softmax)
        page.write(ROOT / "docs" / "models.md", *record.kept())
        page.repeat(page.kept_share(record.kept()[1]), (ROOT / "README.md", ROOT / "docs" / "operators.md"))
    return int(bool(bad))


def _run(chosen: list[Entry], names: list[str], running: record.Running) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    processes.PRELOADED = (*processes.PRELOADED, "tests.matrix.cells", *PRELOADED)
    done = {(cell["entry"], cell["student"]) for cell in running.read()[1]}
    todo = {entry.name: [name for name in names if (entry.name, name) not in done] for entry in chosen}
    todo = {entry: left for entry, left in todo.items() if left}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = [pool.submit(run_entry, entry, left, running) for entry, left in todo.items()]
        for i, job in enumerate(jobs, 1):
            print(f"{i:4}/{len(jobs)} {job.result()}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
