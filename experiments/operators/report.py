"""The report of this experiment: operators.html, operators.md, operators.csv and two figures, made only from saved runs.

Command:  python -m experiments.operators.report runs/operators     (after `segue grid`; speed.json is shown if it is there)
Runtime:  seconds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.operators import comparison, figures, speed, text
from segue.errors import ResultError, SegueError
from segue.lab.report.summary import summarize
from segue.reporting import html
from segue.reporting.palette import require_matplotlib
from segue.reporting.records import read_all, write_file


def build(folder: Path) -> Path:
    """Write the report into the folder of the runs."""
    require_matplotlib()
    compared = comparison.compare(summarize(read_all(folder)))
    if compared is None:
        raise ResultError(
            f"the runs in {folder} do not compare operators.",
            "Fewer than two groups have one student each, or their students are equal.",
            "run `segue grid experiments/operators` first.",
        )
    times = speed.read(folder)
    figures.draw(compared, times, folder / "figures")
    write_file(text.markdown(compared, times), folder / "operators.md")
    write_file(text.csv(compared), folder / "operators.csv")
    return write_file(page(compared, times, folder.resolve().name), folder / "operators.html")


def page(compared: comparison.Comparison, times: speed.Speed | None, title: str) -> str:
    """Render the page: nothing fetched, nothing of the runs read as HTML."""
    return html.page(
        Path(__file__).parent,
        "report.html",
        scripts=["chart.js", "report.js"],
        kind="Segue report: operators",
        title=title,
        data=text.page_data(compared, times),
    )


def main() -> None:
    """Build the report of the folder that the command names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/operators"), help="folder of the runs (%(default)s)")
    folder = parser.parse_args().folder
    try:
        print(build(folder))
    except SegueError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
