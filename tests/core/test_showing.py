"""What terminals and notebooks show: plans, sites, handovers, similarity, reports, costs and trainings."""

import sys
from html.parser import HTMLParser

import pytest
import torch

import segue
from segue.display import Table
from segue.errors import ConfigError, MissingExtraError
from tests.helpers.tiny import SITES, Net, batch, optimizer_for, start, train


class Cells(HTMLParser):
    """Reads the cells of the one table, and refuses a tag that is left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("th", "td"):
            self.cells.append(data)


def fitted(**given):
    loader = [batch(seed) for seed in range(4)]
    return segue.fit(
        Net().train(),
        segue.methods.dcr_dfg(SITES),
        loader,
        segue.Classification(),
        recipe=segue.Recipe(steps=4),
        evaluations=2,
        progress=None,
        **given,
    )


@pytest.fixture(scope="module")
def done():
    return fitted(validation=[batch(9)])


class TestPlan:
    def test_a_plan_prints_what_differs_and_can_be_read_back(self):
        assert repr(segue.Plan(sites="x")) == "Plan(sites='x')"
        plan = segue.methods.theseus(SITES, student=segue.students.LinearAttention(), seed=3)
        lines = repr(plan).splitlines()
        assert lines[0] == "Plan("
        assert [line.strip().partition("=")[0] for line in lines[1:-1]] == [
            *("sites", "student", "gate", "schedule", "teacher_gradient", "seed")
        ]
        names = {**vars(segue.students), **vars(segue.gates), **vars(segue.schedules), "Plan": segue.Plan}
        names["CopyMatching"] = segue.students.CopyMatching
        assert eval(repr(plan), names) == plan

    @pytest.mark.parametrize("method", segue.methods.names())
    def test_its_parts_print_what_differs_too(self, method):
        plan = getattr(segue.methods, method)(SITES, student=segue.students.LinearAttention())
        rooms = (segue.students, segue.gates, segue.schedules, segue.losses, segue.phases)
        names = {name: made for room in rooms for name, made in vars(room).items()} | {"Plan": segue.Plan}
        assert eval(repr(plan), names) == plan
        assert max(map(len, repr(plan).splitlines())) <= 150
        assert "LinearAttention()" in repr(plan)
        assert "\n" not in "".join(Cells(plan._repr_html_()).cells)  # a line of a Markdown table

    def test_a_notebook_gets_the_same_as_a_table(self):
        cells = Cells(segue.methods.dcr("blocks.*", train="all")._repr_html_()).cells
        assert cells == ["setting", "value", "sites", "'blocks.*'", "train", "'all'"]


class TestHandover:
    def test_a_table_of_the_sites(self):
        handover = start(total_steps=10)
        title, heading, *rows = repr(handover).splitlines()
        assert title == str(handover) == "Handover(Net, 3 sites, step 0 of 10, alpha 1)"
        assert heading.split() == ["site", "student", "alpha", "weight", "parameters", "teacher's"]
        assert rows[0].split() == ["blocks.0.attn", "Attention", "1", "0", "288", "288"]
        handover.similarity(batch()[0])
        assert "cosine at step 0" in handover._repr_html_()
        assert Cells(handover._repr_html_()).cells.count("blocks.1.attn") == 1

    def test_it_is_shown_after_the_end_too(self):
        handover = start(segue.Plan(sites=SITES, release=True), total_steps=2)
        train(handover, optimizer_for(handover), 2)
        assert "released" in repr(handover)
        handover.finalize_()
        assert "released" in handover._repr_markdown_()

    def test_a_table_names_the_operator_of_an_attention_student(self):
        """Not the class of its module, which every operator shares."""
        attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        plan = segue.Plan(sites="0", student=segue.students.LinearAttention())
        handover = segue.replace_(torch.nn.ModuleList([attention]), plan)
        assert repr(handover).splitlines()[-1].split()[:2] == ["0", "LinearAttention"]

    def test_a_plot_has_a_line_for_each_course_of_alpha_and_one_for_now(self):
        in_turn = segue.schedules.Staggered()
        (axes,) = start(segue.Plan(sites=SITES, schedule=in_turn), total_steps=10).plot().axes
        assert [line.get_label() for line in axes.lines] == [*start().seams, "now"]
        handover = start(total_steps=10)
        (axes,) = handover.plot().axes
        assert [line.get_label() for line in axes.lines] == ["blocks.0.attn and 2 more", "now"]
        assert axes.lines[0].get_ydata()[0] == 1.0
        assert axes.lines[0].get_ydata()[-1] == 0.0
        assert handover.plot()._repr_png_().startswith(b"\x89PNG")


def test_sites_and_similarity_are_tables():
    sites = segue.select(Net(), SITES)
    assert isinstance(sites, list)
    assert "also known as" not in sites._repr_html_()  # no site has a second name
    assert Cells(sites._repr_html_()).cells[3] == "blocks.0.attn"
    assert repr(sites).splitlines()[0] == "3 sites"
    similar = start().similarity(batch()[0])
    frame = similar.to_pandas()
    assert list(frame.index) == list(similar)
    assert frame.loc["blocks.1.attn", "cosine"] == similar["blocks.1.attn"].cosine
    assert Cells(similar._repr_html_()).cells[5] == "blocks.0.attn"


def test_a_verification_and_a_cost_are_tables():
    handover = start()
    report = handover.verify(batch()[0])
    assert repr(report) == str(report)
    assert Cells(report._repr_html_()).cells.count("ok") == len(report.checks)
    cost = segue.cost(Net(), segue.methods.dcr(SITES), batch()[0])
    assert "operations / full teacher" in cost._repr_markdown_()
    assert max(map(len, repr(cost).splitlines()[:-1])) <= 80


class TestFit:
    def test_a_table_of_the_evaluations(self, done):
        title, heading, *rows = repr(done).splitlines()
        assert title.startswith("Fit(Net, 4 steps, ")
        assert [row.split()[0] for row in rows] == ["0", "2", "4"]
        assert heading.split("  ")[-1] == "students accuracy"
        assert max(map(len, repr(done).splitlines())) <= 80  # the first score of each side; a notebook shows the others too
        assert Cells(done._repr_html_()).cells.count("students loss") == 1
        assert list(done.to_pandas()["students.accuracy"]) == [point["students"]["accuracy"] for point in done.history]

    def test_a_plot_of_a_score_and_alpha(self, done):
        above, below = done.plot().axes
        assert above.get_ylabel() == "accuracy"
        assert [line.get_label() for line in above.lines] == ["blend of both", "students alone"]
        assert list(below.lines[0].get_ydata()) == [point["alpha"] for point in done.history]
        assert done.plot("loss").axes[0].get_ylabel() == "loss"
        with pytest.raises(ConfigError, match=r"there is no score 'los'.\n  Nearest names: loss"):
            done.plot("los")

    def test_a_training_without_scores_says_so(self):
        with pytest.raises(ConfigError, match=r"Fit.plot\(\) needs evaluations."):
            fitted().plot()


@pytest.mark.parametrize(
    ("package", "call"),
    [
        ("pandas", lambda handover: handover.similarity(batch()[0]).to_pandas()),
        ("matplotlib.figure", lambda handover: handover.plot()),
    ],
)
def test_a_missing_package_is_named(package, call, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingExtraError, match=f"needs {package.partition('.')[0]}.\n  It is not installed.\n  Hint: pip install"
    ):
        call(start())


def test_names_are_written_out_and_not_obeyed():
    """Names in a model may hold anything: no tag, no cell and no control character of theirs is obeyed."""
    table = Table("a < b", ("site",), [("<img>|\x1b[2J",)], ("note & more",))
    assert Cells(table.html()).cells == ["site", "<img>|\\x1b[2J"]
    assert "<img>\\|" in table.markdown()
    assert "\x1b" not in table.text() + table.markdown() + table.html()


def test_a_long_table_is_cut_in_a_terminal_alone():
    table = Table("many", ("site", "alpha"), [(f"blocks.{i}", "1") for i in range(40)])
    assert len(table.text().splitlines()) == 15
    assert "..." in table.text()
    assert table.markdown().count("\n| blocks.") == 40


def test_torch_alone_shows_everything(monkeypatch):
    """The tables need neither matplotlib nor pandas nor IPython."""
    for name in ("pandas", "matplotlib", "IPython"):
        monkeypatch.setitem(sys.modules, name, None)
    handover = start()
    assert handover._repr_html_()
    assert handover.plan._repr_markdown_()
    assert torch.is_tensor(handover.model(batch()[0]))
