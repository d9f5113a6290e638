"""Keep what the repository needs of finished runs: packed results and chosen settings, without a path of the machine.

Command:  python -m experiments.evidence.keep digits              (after every few runs; then commit experiments/evidence)
          python -m experiments.evidence.keep digits --restore    (in another clone: the grid then skips the runs that are kept)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.evidence.judges import ALONE, PROTOCOL
from experiments.evidence.settings import SETTINGS
from segue.lab.tune import FILE
from segue.reporting import records

HERE = Path(__file__).parent
RUNS = Path("runs/evidence")


def keep(name: str, runs: Path = RUNS, here: Path = HERE) -> list[Path]:
    """Pack the finished runs of a setting, copy the choices of its searches, and return what was written."""
    written = [records.pack(records.read_all(runs / name), here / "results" / name)] if (runs / name).is_dir() else []
    for folder in sorted(runs.glob(f"{name}*_tune")):
        if (folder / FILE).is_file():
            chosen = records.read_json(folder / FILE, "place", "options")
            options = {option: value for option, value in chosen["options"].items() if option != "data"}
            place = here / "tuned" / f"{folder.name.removesuffix('_tune')}.json"
            written.append(records.write_json({**chosen, "place": "experiments/evidence/runs.py", "options": options}, place))
    return written


def restore(name: str, runs: Path = RUNS, here: Path = HERE) -> list[Path]:
    """Write the kept runs of a setting as the grid that made them did, so that it resumes after them."""
    written = []
    for result in records.read_all(here / "results" / name):
        about, folder = result.run_info, runs / name / result.run_info.name
        if not (folder / records.FILE).exists():
            records.write_json({"config_hash": about.config_hash, "config": about.config}, folder / "config.json")
            written.append(records.write(result, folder))
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=(*SETTINGS, ALONE, PROTOCOL))
    parser.add_argument("--restore", action="store_true", help="Write kept runs back to the folder of the grid.")
    options = parser.parse_args()
    for path in (restore if options.restore else keep)(options.name):
        print(path)


if __name__ == "__main__":
    main()
