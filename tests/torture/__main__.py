"""Attack Segue for some minutes, and count what held: kills, damaged files, wrong calls, NaN, a full disk, a long run.

    make torture                                             20 minutes, seed 0; writes docs/reliability.md
    .venv/bin/python -m tests.torture --minutes 1 --only kills
    .venv/bin/python -m tests.torture --show                 the table of a campaign that runs, or was stopped

The record is runs/torture/record.jsonl, one line for every attempt. It exits with 1 if anything was accepted wrongly, lost,
changed although it failed, hung or ended without a reason, or if more than 2 % ended in a foreign error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.helpers import processes
from tests.helpers.processes import ROOT
from tests.torture import campaign, page
from tests.torture.parts import PARTS


def main() -> int:
    parser = argparse.ArgumentParser(description="Attack Segue for some minutes, and count what held.")
    parser.add_argument("--minutes", type=float, default=20, help="Number of minutes.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of every attempt.")
    parser.add_argument("--only", nargs="+", default=[], help="Words of the parts to run; the page is then not written.")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "torture", help="Folder of the record.")
    parser.add_argument("--show", action="store_true", help="Show the table of the record as it is.")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # one part, in a process that `campaign.run` has started
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        (part,) = [part for part in PARTS if part.name == options.part]
        module = f"tests.torture.{part.entry.partition(':')[0]}"
        processes.PRELOADED = (*processes.PRELOADED, module)  # so that fresh processes start at once
        place = options.out / part.name.replace(" ", "-")
        bench = campaign.Bench(part.name, place, options.seed, options.seconds, options.begin)
        campaign.run_part(part, bench, campaign.Record(options.out / "record.jsonl"))
        return 0
    parts = [part for part in PARTS if not options.only or any(word in part.name for word in options.only)]
    if options.show:
        outcomes = campaign.Record(options.out / "record.jsonl").read()
    else:
        outcomes = campaign.run(parts, options.out.resolve(), seed=options.seed, minutes=options.minutes)
    print(page.table(parts, outcomes))
    bad = page.failures(outcomes)
    foreign = [f"{o['part']}: {o['case']}: {o['detail']}" for o in outcomes if o["verdict"] == campaign.FOREIGN]
    for line in [*(f"foreign error: {line}" for line in foreign), *bad]:
        print(line)
    if not options.only and not options.show:
        page.write_page(ROOT / "docs" / "reliability.md", parts, outcomes, seed=options.seed, minutes=options.minutes)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
