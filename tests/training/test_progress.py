"""The progress line: renewed in a terminal, a few whole lines in a log."""

import io

import pytest

from segue.training import progress
from segue.training.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that goes on by as much as the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


@pytest.mark.parametrize("total", [1, 7, 10, 999])
def test_a_log_gets_at_most_ten_whole_lines(total):
    out = io.StringIO()
    say = Progress("training", total, out=out)
    for done in range(1, total + 1):
        say(done, "loss 0.5")
    lines = out.getvalue().splitlines()
    assert len(lines) == min(10, total)
    assert "\r" not in out.getvalue()
    assert lines[-1] == "training [####################] 100%  loss 0.5"
    assert all(line.startswith("training [") and "loss 0.5" in line for line in lines)


def test_a_terminal_gets_one_line_that_renews_itself_and_leaves_nothing_of_a_longer_one(clock):
    out = Terminal()
    say = Progress("training", 4, out=out)
    for done, text in ((1, "a long text"), (2, "short"), (4, "end")):
        clock.now += 1
        say(done, text)
    first, second, last = out.getvalue().split("\r")[1:]
    assert first.startswith("training [#####...............]  25%  a long text")
    assert len(second) == len(first)
    assert second.startswith("training [##########..........]  50%  short")
    assert last.rstrip(" \n") == "training [####################] 100%  end"
    assert out.getvalue().count("\n") == 1


def test_a_terminal_is_not_written_to_more_often_than_eyes_can_see(clock):
    out = Terminal()
    say = Progress("training", 1000, out=out)
    for done in range(1, 1000):
        say(done)
    assert out.getvalue().count("\r") == 1
    say(1000)
    assert out.getvalue().endswith("100%\n") or out.getvalue().rstrip(" \n").endswith("100%")


def test_the_time_left_follows_the_pace_since_the_start_of_this_process(clock):
    out = io.StringIO()
    say = Progress("training", 100, done=50, out=out)  # a resumed run
    clock.now += 20
    say(60)
    assert out.getvalue().splitlines()[-1].endswith("1 min 20 s left")
    clock.now += 80
    say(100)
    assert "left" not in out.getvalue().splitlines()[-1]


def test_a_run_that_was_resumed_at_its_end_divides_by_nothing():
    out = io.StringIO()
    Progress("training", 5, done=5, out=out)(5)
    assert out.getvalue() == "training [####################] 100%\n"


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3599, "59 min 59 s"), (3600, "1 h 0 min")]
)
def test_durations_are_said_as_people_say_them(seconds, said):
    assert duration(seconds) == said
