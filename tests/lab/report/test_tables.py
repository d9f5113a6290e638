"""Tables: Markdown and CSV of what the summary found."""

from __future__ import annotations

import csv
import io

from segue.lab.report import tables
from segue.lab.report.summary import summarize
from tests.lab.report.saved_runs import LABELS, changed, grid, run


def test_csv_holds_plain_numbers_that_read_back():
    whole = summarize(grid(seeds=3))
    rows = list(csv.DictReader(io.StringIO(tables.csv(whole))))
    assert len(rows) == 3 * len(LABELS)
    method = whole.groups[1].methods[2]
    row = next(row for row in rows if (row["group"], row["method"]) == ("20 %", "theseus"))
    assert float(row["final_mean"]) == method.final.mean
    assert float(row["peak_memory_mean"]) == method.peak_memory.mean
    assert row["epochs_to_99_mean"] == ""
    baseline = next(row for row in rows if row["method"] == "gumbel_dfg")
    assert baseline["final_p"] == ""


def test_markdown_keeps_its_columns_whatever_labels_hold():
    label = "a | b <img src=x> `c`\nd \\"
    text = tables.markdown(summarize([run(label=label, seed=seed, evaluations=3) for seed in range(2)]))
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\\\", "").replace("\\|", "").count("|") for line in table}) == 1
    assert "<img" not in text
    assert "a \\| b &lt;img src=x> \\`c\\` d \\\\" in text


def test_scores_that_are_no_fractions_are_plain_numbers():
    result = changed(
        run(evaluations=3), score="bits", final={"bits": -1.25}, teacher={"bits": -1.0}, teacher_eval={"bits": -1.0}
    )
    text = tables.markdown(summarize([result]))
    assert "-1.25" in text
    assert "-125" not in text
