"""Stop and resume: signals, errors and kill -9, and trainings that continue bit for bit."""

import itertools
import json
import os
import random
import shutil
import signal
import threading
from pathlib import Path

import pytest

import segue
from segue.checkpoint import folders
from segue.errors import CheckpointError, SegueError
from segue.training.resume import Interruption
from segue.training.tasks import Classification
from tests.checkpoint.test_forged_leaves import FORGED
from tests.checkpoint.test_restoring import dict_at, forge, set_at
from tests.helpers.processes import FreshProcess
from tests.helpers.tiny import SITES, Net, same_state
from tests.training import fit_cases
from tests.training.fit_cases import CASES, TOTAL, Stop, assert_alike, fit, metrics

METHODS = segue.methods.ALL


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


# Stopped and resumed


def undisturbed(name, tmp_path):
    fit_cases.train(name, tmp_path / "undisturbed")
    return tmp_path / "undisturbed"


HOWS = {"SIGTERM": SystemExit, "SIGINT": KeyboardInterrupt, "error": RuntimeError}


def stop(name, folder, how, step):
    """Train a case until it is stopped."""
    accumulate = CASES[name]["recipe"].accumulate
    with pytest.raises(HOWS[how]):
        fit_cases.train(name, folder, loss=Stop(how, step, accumulate))


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_stopped_anywhere_resumes_bit_for_bit_in_a_fresh_process(tmp_path):
    """Every case is stopped at another place by a signal, or by an error after its last checkpoint; two in every way."""
    steps, ways = itertools.cycle((4, 7, 1, 5, 2, 6, 3)), itertools.cycle(HOWS)
    places = {}
    for name in CASES:
        for how in HOWS if name in ("dcr_dfg", "a plain model") else [next(ways)]:
            folder = tmp_path / f"{name}, {how}"
            stop(name, folder, how, next(steps))
            places[str(folder)] = name
    FreshProcess(fit_cases.train_all, places, log=tmp_path / "log").check()
    for name in CASES:
        fit_cases.train(name, tmp_path / name)
    for folder, name in places.items():
        assert_alike(folder, tmp_path / name)


def test_the_undisturbed_runs_of_those_cases_really_learn_and_hand_over(tmp_path):
    for name in ("dcr_dfg", "theseus", "a plain model"):
        fitted = fit_cases.train(name, tmp_path / name)
        assert len({found["loss"] for found in fitted.history}) == len(fitted.history) == 5
        if fitted.handover:
            assert fitted.history[0]["alpha"] > fitted.history[2]["alpha"] > fitted.history[-1]["alpha"] == 0


@pytest.mark.parametrize(("how", "code"), [("SIGTERM", 143), ("SIGINT", None)])
def test_a_signal_lets_the_step_end_and_saves_it(how, code, tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(HOWS[how]) as caught:
        fit_cases.train("dcr_dfg", tmp_path, loss=Stop(how, 4))
    assert segue.checkpoint.state.saved_step(tmp_path / "checkpoints") == 5
    if code is None:
        assert f"stopped at step 5 of {TOTAL}; saved in {tmp_path}" in str(caught.value)
    else:
        assert caught.value.code == code
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_ctrl_c_does_not_wait_for_the_step(tmp_path):
    class Impatient(Stop):
        def __call__(self, model, batch):
            loss = super().__call__(model, batch)
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return loss

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fit_cases.train("dcr_dfg", tmp_path, loss=Impatient("SIGINT", 4))
    assert segue.checkpoint.state.saved_step(tmp_path / "checkpoints") == 3  # the last of every three
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT"])
def test_a_signal_in_the_last_step_is_not_lost(how, tmp_path):
    """A teacher's second stage, or the next run of a script, must not begin after it; the work is saved as always."""
    with pytest.raises(HOWS[how]):
        fit_cases.train("dcr_dfg", tmp_path, loss=Stop(how, TOTAL - 1))
    assert segue.checkpoint.state.saved_step(tmp_path / "checkpoints") == TOTAL
    fit_cases.train("dcr_dfg", tmp_path)
    assert_alike(tmp_path, undisturbed("dcr_dfg", tmp_path))


@pytest.mark.parametrize("progress", ["training", None])
def test_without_a_folder_a_signal_stops_too(progress, capsys):
    with pytest.raises(KeyboardInterrupt, match="stopped at step 2 of 6; nothing is saved"):
        fit(Net(), loss=Stop("SIGINT", 1), progress=progress)
    assert ("Interrupted" in capsys.readouterr().err) == (progress is not None)  # where nothing is shown, the caller says it


def test_a_signal_during_an_evaluation_stops_after_the_next_step(tmp_path):
    class Evaluated(Classification):
        def scores(self, model, batch):
            if len(metrics(tmp_path)) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().scores(model, batch)

    (tmp_path / "metrics.jsonl").write_text("")
    try:
        with pytest.raises(SystemExit):
            fit_cases.train("dcr_dfg", tmp_path, loss=Evaluated(label_smoothing=0.1))
    except KeyboardInterrupt:
        pytest.fail("a SIGTERM that came again stopped the evaluation at once")
    assert segue.checkpoint.state.saved_step(tmp_path / "checkpoints") == 6


def test_an_earlier_training_in_the_folder_is_refused_and_nothing_is_changed(tmp_path):
    fit_cases.train("dcr_dfg", tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.glob("**/*") if path.is_file()}
    model = Net().eval()
    with pytest.raises(CheckpointError, match="already contains a training") as caught:
        fit(model, METHODS["dcr"](sites=SITES), folder=tmp_path)
    assert "resume=True" in str(caught.value)
    assert {path: path.read_bytes() for path in tmp_path.glob("**/*") if path.is_file()} == files
    assert not model.training
    assert same_state(model.state_dict(), Net().state_dict())


def test_resuming_what_is_finished_or_never_began_is_no_mistake(tmp_path):
    first = fit_cases.train("theseus", tmp_path, resume=True)
    again = fit_cases.train("theseus", tmp_path, resume=True, loss=Stop("error", 0))  # no step is taken
    assert again.history == first.history
    assert again.seconds == first.seconds
    assert again.handover.steps_done == TOTAL
    assert same_state(again.model.state_dict(), first.model.state_dict())


def test_a_torn_last_line_of_the_metrics_is_written_again(tmp_path):
    for name in ("dcr_dfg", "a plain model"):
        stop(name, tmp_path / name, "error", 7)
        path = tmp_path / name / "metrics.jsonl"
        whole = path.read_bytes()
        for torn in (whole[:-1], whole[:-20], whole + b'{"step": 7, "ep', whole + b"\0\0\0"):
            folder = tmp_path / "torn"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(tmp_path / name, folder)
            (folder / "metrics.jsonl").write_bytes(torn)
            fit_cases.train(name, folder)
            if torn != whole[:-20]:  # there the evaluation of step 6, at the checkpoint, is lost
                assert [found["step"] for found in metrics(folder)] == [0, 2, 5, 6, TOTAL]
            json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def test_evaluations_after_the_last_checkpoint_are_repeated_once(tmp_path):
    stop("dcr_dfg", tmp_path, "error", 5)  # saved at 3, evaluated at 5
    assert [found["step"] for found in metrics(tmp_path)] == [0, 2, 5]
    fitted = fit_cases.train("dcr_dfg", tmp_path)
    assert [found["step"] for found in fitted.history] == [found["step"] for found in metrics(tmp_path)] == [0, 2, 5, 6, TOTAL]


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    fit_cases.train("a plain model", tmp_path / "plain")
    with pytest.raises(CheckpointError, match="It holds a plain model in training"):
        fit(Net(), METHODS["dcr"](sites=SITES), folder=tmp_path / "plain", resume=True)
    fit_cases.train("dcr_dfg", tmp_path / "handover")
    with pytest.raises(CheckpointError, match="It holds a running handover"):
        fit(Net(), folder=tmp_path / "handover", resume=True)
    with pytest.raises(CheckpointError, match="differ from those it was trained with"):
        fit_cases.train("dcr_dfg", tmp_path / "handover", model=Net(seed=1))


# Killed


@pytest.mark.slow
@pytest.mark.processes
def test_kill_9_at_any_file_operation_of_a_checkpoint_loses_nothing_but_steps(tmp_path):
    """The eight file operations of one checkpoint, spread over the first three checkpoints."""
    wanted = undisturbed("theseus_gumbel", tmp_path)
    resumed = {}
    for number in (0, 2, 5, 9, 13, 15, 17, 22):
        folder = tmp_path / f"move {number}"
        assert (
            FreshProcess(fit_cases.train_and_die_writing, "theseus_gumbel", str(folder), number, log=tmp_path / "log").wait()
            == -signal.SIGKILL
        )
        resumed[str(folder)] = "theseus_gumbel"
    saved = [
        segue.checkpoint.state.saved_step(Path(f) / "checkpoints") for f in resumed if (Path(f) / "checkpoints/latest").exists()
    ]
    assert len(set(saved)) > 1
    FreshProcess(fit_cases.train_all, resumed, log=tmp_path / "log").check()
    for folder in resumed:
        assert_alike(folder, wanted)
        assert not list(Path(folder).glob("checkpoints/.draft-*")), "what a kill left half written is cleared away"


@pytest.mark.slow
@pytest.mark.processes
def test_kill_9_at_random_moments_loses_nothing_but_steps(tmp_path):
    killed = 0
    for name in ("everything trains", "a plain model, accumulated"):
        for moment in (0.05, *(random.Random(name).uniform(0.05, 0.5) for _ in range(3)), None):
            process = FreshProcess(fit_cases.train_all, {str(tmp_path / name): name}, log=tmp_path / "log")
            if moment is not None:
                process.process.join(timeout=moment)
                process.process.kill()
            killed += process.wait() == -signal.SIGKILL
        fit_cases.train(name, tmp_path / "undisturbed" / name)
        assert_alike(tmp_path / name, tmp_path / "undisturbed" / name)
    assert killed > 0


# Another checkpoint than the latest


def test_the_call_of_the_hint_takes_the_earlier_checkpoint(tmp_path):
    stop("dcr_dfg", tmp_path, "error", 7)  # saved at 3 and 6
    newest, _ = folders.checkpoints(tmp_path / "checkpoints")
    (newest / "state.json").unlink()
    with pytest.raises(CheckpointError, match="state.json is missing") as caught:
        fit_cases.train("dcr_dfg", tmp_path)
    hint = str(caught.value).splitlines()[-1]
    assert "segue resume" not in hint, "it is not a run of a command"
    call = hint[hint.index("fit(...") :]

    def fit(anything, resume):
        return fit_cases.train("dcr_dfg", tmp_path, resume=resume)

    eval(call, {"fit": fit})
    assert_alike(tmp_path, undisturbed("dcr_dfg", tmp_path))


def test_a_deleted_latest_does_not_begin_at_step_0(tmp_path):
    stop("dcr_dfg", tmp_path, "error", 7)
    (tmp_path / "checkpoints" / "latest").unlink()
    with pytest.warns(segue.SegueWarning, match="so the newest complete one is taken: 00000006-"):
        fitted = fit_cases.train("dcr_dfg", tmp_path, loss=Stop("error", 4))  # three steps are left
    assert fitted.handover.steps_done == TOTAL
    assert_alike(tmp_path, undisturbed("dcr_dfg", tmp_path))


def test_a_checkpoint_can_be_resumed_in_another_folder_or_without_one(tmp_path):
    stop("dcr_dfg", tmp_path / "first", "error", 7)
    newest, earlier = folders.checkpoints(tmp_path / "first" / "checkpoints")
    fitted = fit_cases.train("dcr_dfg", tmp_path / "second", resume=earlier)
    assert [found["step"] for found in metrics(tmp_path / "second")] == [5, 6, TOTAL]
    wanted = Path(undisturbed("dcr_dfg", tmp_path), "model.txt").read_text()
    assert (tmp_path / "second" / "model.txt").read_text() == wanted
    case = CASES["dcr_dfg"]
    alone = fit(
        Net(dropout=0.2),
        case["plan"],
        case["batches"](),
        Classification(label_smoothing=0.1),
        recipe=case["recipe"],
        resume=str(newest),
    )
    assert same_state(alone.model.state_dict(), fitted.model.state_dict())
    with pytest.raises(CheckpointError, match="There is no such folder"):
        fit_cases.train("dcr_dfg", tmp_path / "third", resume=tmp_path / "nowhere")


def in_the_loop(*path, value):
    """Return a change of one value in the state of the loop, which is packed."""

    def change(state, tensors):
        pairs = state["lr_scheduler"]["dict"]
        for name in path[:-1]:
            pairs = dict_at({"dict": pairs}, name)["dict"]
        next(pair for pair in pairs if pair[0] == path[-1])[1] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_at("segue", value=...),
        set_at("segue", value=[None]),
        set_at("segue", "total_steps", value=...),
        in_the_loop("skipped", value=-1),
        in_the_loop("skipped", value=10**400),
        in_the_loop("seconds", value=10**400),
        in_the_loop("seconds", value=float("nan")),
        in_the_loop("running_means", "steps", value=2.5),
        in_the_loop("running_means", "losses", value=None),
        in_the_loop("running_means", "norms", value={"list": [1.0]}),
    ],
)
def test_a_forged_checkpoint_does_not_resume(change, tmp_path):
    with pytest.raises(RuntimeError):
        fit_cases.train("dcr_dfg", tmp_path, loss=Stop("error", 4))
    (place,) = folders.checkpoints(tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "latest").write_text(forge(place, change).name)
    with pytest.raises(SegueError) as caught:
        fit_cases.train("dcr_dfg", tmp_path)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("path", [("seconds",), ("skipped",), ("running_means", "losses"), ("running_means", "steps")])
def test_no_forged_counter_of_the_loop_is_taken(path, tmp_path):
    with pytest.raises(RuntimeError):
        fit_cases.train("a plain model", tmp_path, loss=Stop("error", 4))
    (place,) = folders.checkpoints(tmp_path / "checkpoints")
    possible = [1.5] if path[-1] in ("seconds", "losses") else []
    for value in [value for value in FORGED if value not in possible]:
        place = forge(place, in_the_loop(*path, value=value))
        (tmp_path / "checkpoints" / "latest").write_text(place.name)
        with pytest.raises(SegueError, match=r"does not take the state|cannot be understood"):
            fit_cases.train("a plain model", tmp_path)
