"""How long a new user waits: from an empty environment and the built wheel to the first figure in a notebook.

Command: python -m build --wheel && python docs/tools/first_figure.py dist/segue-*.whl    # any Python; needs a package index
Expected: docs/faq.md, "How long until I see something?".

Makes a virtual environment in a temporary folder, installs the wheel with the extra of the first guide and what a notebook
needs (pins of constraints.txt), and runs docs/notebooks/1-first-handover.ipynb there by nbclient until a cell shows a picture.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebooks" / "1-first-handover.ipynb"
EXTRA = "lab"
NOTEBOOK_PACKAGES = ("nbclient", "ipykernel", "ipywidgets")
RUN = """
import sys, time
import nbformat
from nbclient import NotebookClient

def executed(cell, cell_index, execute_reply):
    if any("image/png" in out.get("data", {}) for out in cell.outputs):
        print(time.time())
        sys.stdout.flush()

NotebookClient(nbformat.read(sys.argv[1], as_version=4), timeout=1200, on_cell_executed=executed).execute()
"""


def main() -> None:
    """Measure once and print one line for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="The built wheel.")
    wheel = parser.parse_args().wheel.resolve()
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env["MPLCONFIGDIR"] = "matplotlib"  # a new user's font cache is not made yet
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "env", "bin", "python")

        def run(*command: object) -> str:
            done = subprocess.run([*map(str, command)], cwd=folder, env=env, check=True, text=True, stdout=subprocess.PIPE)
            return done.stdout

        times = [time.time()]
        run(sys.executable, "-m", "venv", "env")
        times.append(time.time())
        pins = ("--no-cache-dir", "-qq", "--constraint", ROOT / "constraints.txt")
        run(python, "-m", "pip", "install", *pins, f"{wheel}[{EXTRA}]", *NOTEBOOK_PACKAGES)
        times.append(time.time())
        times.append(float(run(python, "-c", RUN, NOTEBOOK).split()[0]))
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        packages = len(json.loads(run(python, "-m", "pip", "list", "--format", "json")))
    made, installed, shown = (after - before for before, after in itertools.pairwise(times))
    print(f"virtual environment      {made:6.1f} s")
    print(f"pip install              {installed:6.1f} s   ({packages} packages)")
    print(f"notebook, to its figure  {shown:6.1f} s")
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}"
    print(f"altogether               {times[-1] - times[0]:6.1f} s by the clock; {machine}")
    print(f"processor time           {spent.ru_utime + spent.ru_stime:6.1f} s, with the cells after the figure")


if __name__ == "__main__":
    main()
