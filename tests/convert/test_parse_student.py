"""Students and spans from text: objects come out, and nothing typed is ever run."""

from contextlib import suppress

import pytest

from segue import methods, students
from segue.convert import parse_student as parse
from segue.errors import ConfigError, PlanError
from segue.losses import LogitDistillation
from segue.phases import Phase, Rates
from segue.schedules import Cosine, Staggered
from segue.sites import Span


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("WindowedLinear", students.WindowedLinear()),
        (" LinearAttention() ", students.LinearAttention()),
        ("WindowedLinear(window=32)", students.WindowedLinear(window=32)),
        ("SlidingWindow(global_tokens=2)", students.SlidingWindow(sinks=2)),  # the name of version 0.1.0
        ("NarrowMlp(ratio=0.5, init=TruncatedSvd())", students.NarrowMlp(ratio=0.5, init=students.TruncatedSvd())),
        ("LowRankMlp(rank=3)", students.LowRankMlp(rank=3)),
        ("Reinit", students.Reinit()),
    ],
)
def test_what_one_types_is_the_object(text, wanted):
    assert parse.student(text) == wanted


TOUCH = "__import__('pathlib').Path('MARK').touch()"
ATTACKS = [
    TOUCH,
    f"WindowedLinear(window={TOUCH})",
    f"WindowedLinear(window=[{TOUCH} for _ in (1,)])",
    f"WindowedLinear(window=(lambda: {TOUCH})())",
    f'WindowedLinear(window=f"{{{TOUCH}}}")',
    f"Reinit() if {TOUCH} else Reinit()",
    f"({TOUCH}, Reinit())[1]",
    f"(made := {TOUCH})",
    "Reinit.__init__.__globals__['__builtins__']['__import__']('pathlib').Path('MARK').touch()",
]


@pytest.mark.parametrize("text", ATTACKS)
def test_code_is_refused_and_not_run(text, tmp_path):
    mark = tmp_path / "mark"
    attack = text.replace("MARK", str(mark))
    with pytest.raises(ConfigError, match="is not a student"):
        parse.student(attack)
    assert not mark.exists()
    with suppress(PlanError):  # of the setting that the attack leaves, after it ran
        eval(attack, {name: getattr(students, name) for name in students.__all__})  # it would have worked
    assert mark.exists()


@pytest.mark.parametrize("text", [f"dcr(gate={TOUCH})", f"lolcats(hold=(lambda: {TOUCH})())", TOUCH, f"dcr(phases=({TOUCH},))"])
def test_code_in_a_method_or_a_loss_is_refused_and_not_run(text, tmp_path):
    attack = text.replace("MARK", str(tmp_path / "mark"))
    with pytest.raises(ConfigError, match="is not a method"):
        parse.method(attack)
    with pytest.raises(ConfigError, match="is not a loss for --distill"):
        parse.loss(attack.replace("dcr(gate", "LogitDistillation(weight"), "distill", LogitDistillation())
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("dcr", {}),
        ("halo(hold=0.3)", {"hold": 0.3}),
        ("transfer(lr=Rates(new=1e-2, copied=0.0), first='new')", {"lr": Rates(new=1e-2, copied=0.0), "first": "new"}),
        ("dcr(schedule=Staggered(then=Cosine()))", {"schedule": Staggered(then=Cosine())}),
        (
            "dcr(phases=(Phase(name='a', length=0.5), Phase(name='b')))",
            {"phases": (Phase(name="a", length=0.5), Phase(name="b"))},
        ),
    ],
)
def test_a_method_has_settings_of_its_own_and_of_a_plan(text, settings):
    made, found = parse.method(text)
    assert found == settings
    assert made is methods.ALL[text.partition("(")[0]]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("dcr_dgf", "Nearest names: dcr_dfg"),
        ("lolcats(hold=2)", "hold"),
        ("lolcats(0.3)", "settings must be given by name"),
        ("lolcats(student=Reinit())", "has no setting 'student'"),  # it has an option of its own
        ("lolcats(hold=wide)", "Nearest names"),
        ("dcr(phases=(Phase(name='a', length=0.5),))", "must add up to 1"),
    ],
)
def test_what_is_not_a_method_gets_three_lines(text, found):
    with pytest.raises(ConfigError) as caught:
        parse.method(text)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert found in lines[1]


@pytest.mark.parametrize(
    ("text", "found"),
    [("LogitDistilation", "Nearest names: LogitDistillation"), ("-1", "at least 0"), ("Blend", "The only names are")],
)
def test_what_is_not_a_loss_gets_three_lines(text, found):
    with pytest.raises(ConfigError) as caught:
        parse.loss(text, "distill", LogitDistillation())
    assert len(str(caught.value).splitlines()) == 3
    assert found in str(caught.value).splitlines()[1]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("WindowLinear", "Nearest names: WindowedLinear"),
        ("WindowedLinear(", "never closed"),
        ("WindowedLinear(64)", "settings must be given by name"),
        ("WindowedLinear(windows=64)", "Nearest names: window"),
        ("WindowedLinear(window=wide)", "Nearest names"),
        ("NarrowMlp", "ratio"),
        ("Kaiming", "names is similar"),
        ("AttentionSpec", "Nearest names: LinearAttention"),
        ("'WindowedLinear'", "does not name one"),
        ("", "cannot be parsed"),
        ("1 + 1", "does not name one"),
    ],
)
def test_what_is_not_a_student_gets_three_lines(text, found):
    with pytest.raises(ConfigError) as caught:
        parse.student(text)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert found in lines[1]
    assert "WindowedLinear(window=64)" in lines[2]


def test_the_example_of_the_hint_is_itself_a_student():
    with pytest.raises(ConfigError) as caught:
        parse.student("")
    named = str(caught.value).split("'")[-2]
    assert callable(parse.student(named))


def test_a_span_is_read_and_a_pattern_stays_a_pattern():
    assert parse.sites("Span('model.layers', every=2)") == Span("model.layers", every=2)
    assert parse.sites("model.layers.*.mlp") == "model.layers.*.mlp"
    for wrong in ("Span(", "Span(__import__('os').getcwd())", "Span('layers', evry=2)", "Span('a').layers"):
        with pytest.raises(ConfigError, match="cannot be parsed"):
            parse.sites(wrong)


def test_a_value_that_python_itself_refuses_is_an_error_of_three_lines():
    with pytest.raises(ConfigError, match="is neither a plain value nor one of Segue's parts") as caught:
        parse.student("WindowedLinear(window={[]: 1})")
    assert len(str(caught.value).splitlines()) == 3
