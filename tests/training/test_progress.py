"""Progress: a bar in a terminal, a few complete lines in a log."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import pytest

from segue.training import progress
from segue.training.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that moves when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("total", [1, 7, 10, 999])
def test_a_log_gets_at_most_ten_complete_lines(total):
    out = io.StringIO()
    show = Progress("training", total, out=out)
    for done in range(1, total + 1):
        show(done, "loss 0.5")
    lines = out.getvalue().splitlines()
    assert len(lines) == min(10, total)
    assert "\r" not in out.getvalue()
    assert re.fullmatch(rf"training: 100% {total}/{total} \[.*, loss 0.5\]", lines[-1])
    assert all(line.startswith("training: ") and "loss 0.5" in line for line in lines)


def test_a_terminal_gets_one_line_that_is_drawn_again_and_then_left():
    out = Terminal()
    show = Progress("training", 1000, out=out)
    for done in range(1, 1000):
        show(done)
    assert out.getvalue().count("\r") < 20  # tqdm draws ten times a second
    show(1000, "loss 0.5")
    last = out.getvalue().split("\r")[-1]
    assert re.fullmatch(r"training: 100%\|.*\| 1000/1000 \[.*, loss 0.5\] *\n", last)
    assert out.getvalue().count("\n") == 1


def test_the_bar_makes_room_for_other_lines():
    out = Terminal()
    show = Progress("training", 10, out=out)
    with show.hidden():
        print("an evaluation", file=out)
    cleared, line = out.getvalue().split("\r")[-3:-1]
    assert cleared.strip() == ""
    assert line == "an evaluation\n"
    show.close()
    assert out.getvalue().endswith("\n")


def test_without_a_name_nothing_is_shown():
    for out in (io.StringIO(), Terminal()):
        show = Progress(None, 2, out=out)
        show(1)
        with show.hidden():
            show(2)
        assert out.getvalue() == ""


def test_the_time_left_follows_the_pace_of_this_process(monkeypatch):
    clock, out = Clock(), io.StringIO()
    monkeypatch.setattr(progress, "time", clock)
    show = Progress("training", 100, done=50, out=out)  # a resumed run
    clock.now += 20
    show(60)
    assert "60/100 [00:20<01:20" in out.getvalue().splitlines()[-1]
    clock.now += 80
    show(100)
    assert "100/100 [01:40<00:00" in out.getvalue().splitlines()[-1]


def test_a_run_that_resumes_at_its_end_divides_by_nothing():
    out = io.StringIO()
    Progress("training", 5, done=5, out=out)(5)
    assert out.getvalue().startswith("training: 100% 5/5 [")


def test_an_evaluation_before_the_first_step_does_not_slow_the_pace_and_those_to_come_count(monkeypatch):
    clock, out = Clock(), io.StringIO()
    monkeypatch.setattr(progress, "time", clock)
    show = Progress("training", 100, pauses=3, out=out)
    with show.paused():  # the first of three
        clock.now += 30
    clock.now += 20
    show(10)
    assert "10/100 [00:50<04:00,  2.00s/it" in out.getvalue().splitlines()[-1]  # 90 steps of 2 s, two evaluations of 30
    with show.paused():
        clock.now += 30
    clock.now += 80
    show(50)
    assert "50/100 [02:40<02:10" in out.getvalue().splitlines()[-1]


def test_the_time_left_follows_the_pace_of_the_latest_steps(monkeypatch):
    clock, out = Clock(), io.StringIO()
    monkeypatch.setattr(progress, "time", clock)
    show = Progress("training", 100, out=out)
    for done in range(1, 81):
        clock.now += 1 if done <= 50 else 3
        show(done)
    assert show.pace == 3
    assert show.seconds_left == 60


def test_the_bar_leaves_an_evaluation_out_too(monkeypatch):
    clock, out = Clock(), Terminal()
    monkeypatch.setattr(progress, "time", clock)
    show = Progress("training", 10, pauses=1, out=out)
    with show.paused():
        clock.now += 600
    clock.now += 2
    show(1)
    show.bar.refresh()  # tqdm has a clock of its own
    assert "<00:18" in out.getvalue().split("\r")[-1]
    show.close()


def test_the_time_left_knows_that_the_second_half_is_slower(monkeypatch):
    clock, out = Clock(), io.StringIO()
    monkeypatch.setattr(progress, "time", clock)
    show = Progress("training", 40, costs=[0.5] * 20 + [1.5] * 20, out=out)
    clock.now += 40  # 2 s a step, in the first half
    show(20)
    assert "20/40 [00:40<02:00,  2.00s/it]" in out.getvalue().splitlines()[-1]  # 6 s a step, in the second


IN_A_TERMINAL = """
import os, time
from segue.training.progress import Progress
show = Progress("training", total=40)
show.bar.mininterval = 0  # every step is drawn
for step in range(40):
    show(step + 1, "loss 0.3141, guidance 0.1234, distill 0.1234, students: KL 0.0868, same first choice 90.5 %")
"""


@pytest.mark.processes
@pytest.mark.parametrize("columns", [80, 0], ids=["80 columns", "unknown width"])
def test_forty_steps_are_one_line_in_a_terminal(columns):
    """What a real terminal gets: no line is longer than it, so that the next one is drawn over it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    running = subprocess.Popen([sys.executable, "-c", IN_A_TERMINAL], stderr=theirs, stdin=subprocess.DEVNULL)
    os.close(theirs)
    written = b""
    with suppress(OSError):  # the other end is closed
        while part := os.read(ours, 65536):
            written += part
    os.close(ours)
    assert running.wait() == 0
    text = written.decode()
    assert text.count("\n") == 1
    drawn = text.replace("\n", "").split("\r")
    assert len(drawn) > 40
    assert max(map(len, drawn)) <= 80


def test_a_notebook_without_widgets_gets_one_line_too():
    class Stream(io.StringIO):
        __module__ = "ipykernel.iostream"

    out = Stream()
    show = Progress("training", total=40, out=out)
    for step in range(40):
        show(step + 1, "loss 0.3")
    assert out.getvalue().count("\n") == 1
    assert "\r" in out.getvalue()
