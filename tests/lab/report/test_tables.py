"""Tables: Markdown and CSV of what the summary found."""

from __future__ import annotations

import csv
import io

import pytest

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
    assert row["epochs_to_99_median"] == ""
    baseline = next(row for row in rows if row["method"] == "gumbel_dfg")
    assert baseline["final_p"] == ""


@pytest.mark.parametrize("begin", list("=+-@\t\r\uff1d\uff0b\uff0d\uff20"))
def test_a_text_in_csv_is_no_formula_and_a_negative_number_stays_a_number(begin):
    label = f'{begin}HYPERLINK("http://a.b","c")'
    result = changed(
        run(label=label, group=label, evaluations=3), score="b", final={"b": -1.25}, teacher={"b": -1}, teacher_eval={"b": -1}
    )
    (row,) = csv.DictReader(io.StringIO(tables.csv(summarize([result])), newline=""))
    assert (row["label"], row["group"]) == (f"'{label}", f"'{label}")
    assert (row["final_mean"], row["teacher"]) == ("-1.25", "-1.0")
    assert tables.as_csv([{label: 1}]).startswith("\"'")


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
