"""Signals while training: the step is finished first; a second Ctrl-C does not wait."""

import os
import signal
import threading

import pytest

from segue.training.signals import Interruption


@pytest.fixture(autouse=True)
def handlers():
    """Every test must leave the handlers as they were."""
    before = {number: signal.getsignal(number) for number in Interruption.SIGNALS}
    yield
    after = {number: signal.getsignal(number) for number in Interruption.SIGNALS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def noted(*numbers: int) -> int | None:
    """Return what is noted of these signals, or None if they stopped the work."""
    try:
        with Interruption() as interruption:
            for number in numbers:
                send(number)
    except KeyboardInterrupt:  # which would end the test run
        return None
    return interruption.caught


@pytest.mark.parametrize("number", Interruption.SIGNALS)
def test_a_signal_is_noted_and_nothing_stops(number):
    with Interruption() as interruption:
        assert interruption.caught == 0
        send(number)
        assert interruption.caught == number


def test_a_second_ctrl_c_stops_at_once():
    with pytest.raises(KeyboardInterrupt), Interruption():
        send(signal.SIGINT)
        send(signal.SIGINT)


def test_ctrl_c_after_a_sigterm_stops_at_once():
    with pytest.raises(KeyboardInterrupt), Interruption():
        send(signal.SIGTERM)
        send(signal.SIGINT)


def test_a_sigterm_that_comes_twice_does_not_stop_the_step_in_hand():
    """A scheduler signals every process of a job, and torchrun passes its own signal on to them."""
    assert noted(signal.SIGTERM, signal.SIGTERM) == signal.SIGTERM


def test_a_sigterm_after_ctrl_c_does_not_change_how_the_process_leaves():
    assert noted(signal.SIGINT, signal.SIGTERM) == signal.SIGINT


def test_the_handlers_come_back_after_an_error():
    own = signal.signal(signal.SIGTERM, lambda number, frame: None)
    mine = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), Interruption():
        assert signal.getsignal(signal.SIGTERM) is not mine
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is mine
    signal.signal(signal.SIGTERM, own)


def test_in_another_thread_signals_are_left_alone():
    seen = []

    def work():
        with Interruption() as interruption:
            seen.append((interruption.caught, signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(0, before)]


def test_leaving_is_what_the_signal_would_have_done():
    with pytest.raises(KeyboardInterrupt, match="stopped at step 3"):
        Interruption.leave(signal.SIGINT, "stopped at step 3")
    with pytest.raises(SystemExit) as caught:
        Interruption.leave(signal.SIGTERM, "stopped at step 3")
    assert caught.value.code == 143
