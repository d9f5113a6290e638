"""What a handover says: its log, the warning behind its last step, and what trains."""

import logging
import warnings

import pytest
import torch

import segue
from segue.errors import SegueWarning
from segue.phases import Phase
from tests.helpers.processes import run_python
from tests.helpers.tiny import SITES, batch, optimizer_for, start, train


def messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("segue.")]


def test_the_log_names_takeovers_phases_and_the_end(caplog, tmp_path):
    phases = (Phase(name="apart", length=0.5, schedule=segue.schedules.Constant(alpha=1.0)), Phase(name="alone"))
    with caplog.at_level(logging.INFO, logger="segue"):
        handover = start(segue.Plan(sites=SITES, phases=phases), total_steps=4)
        optimizer = optimizer_for(handover)
        train(handover, optimizer, 4)
        segue.save(handover, tmp_path, optimizer=optimizer)
        segue.load_(handover, tmp_path, optimizer=optimizer)
        handover.finalize_()
    begins, takes, phase, restored, ends = messages(caplog)
    assert begins == "Net: the handover begins at 3 sites (blocks.0.attn, blocks.1.attn, blocks.2.attn)"
    assert takes == "step 2 of 4: students take over at 3 sites (blocks.0.attn, blocks.1.attn, blocks.2.attn)"
    assert phase == "step 2 of 4: the phase 'alone' begins"
    assert restored.endswith("restored 12 tensors, optimizer, the random states")
    assert ends == "Net: the handover is finalized at step 4"


def test_the_log_names_what_a_guard_undoes(caplog):
    handover = start(total_steps=4)
    optimizer = optimizer_for(handover)
    guard = segue.Guard().watch(handover, optimizer)
    loss = handover.model(batch()[0]).sum()
    loss.backward()
    with caplog.at_level(logging.INFO, logger="segue"):
        assert not guard(loss * torch.inf)
    assert messages(caplog) == ["step 0: not finite inf; the state of step 0 is back (retry 1)"]


@pytest.mark.processes
def test_the_log_is_quiet_until_it_is_asked_for():
    code = (
        "import segue, torch; segue.replace_(torch.nn.Sequential(torch.nn.Linear(2, 2)), segue.Plan(sites='0'), total_steps=1)"
    )
    quiet = run_python("-c", code)
    assert (quiet.stdout, quiet.stderr) == ("", "")
    heard = run_python("-c", f"import logging; logging.basicConfig(level='INFO'); {code}")
    assert heard.stderr == "INFO:segue.core.events:Sequential: the handover begins at 1 site (0)\n"


def test_a_step_past_the_end_warns_once():
    handover = start(total_steps=2)
    optimizer = optimizer_for(handover)
    train(handover, optimizer, 2)
    with pytest.warns(
        SegueWarning, match=r"step\(\) is called after the last of total_steps=2 steps: .*Count optimizer"
    ) as seen:
        train(handover, optimizer, 1)
    assert seen[0].filename.endswith("tiny.py")  # where the user calls it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(handover, optimizer, 2)
    assert handover.steps_done == 5


def test_it_prints_what_trains(capsys):
    handover = start()
    handover.print_trainable_parameters()
    students = sum(p.numel() for seam in handover.seams.values() for p in seam.student.parameters())
    rest = sum(p.numel() for p in handover.model.parameters()) - students  # the teachers have as many
    expected = f"trainable: {students:,} of {rest:,} parameters ({students / rest:.1%}; new {students:,}); "
    assert capsys.readouterr().out == f"{expected}teachers beside them: {students:,}\n"
    start(segue.Plan(sites=SITES, train="all")).print_trainable_parameters()
    assert f"backbone {rest - students:,}, new {students:,}" in capsys.readouterr().out
