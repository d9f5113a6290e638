"""Checkpoints of Hugging Face's Trainer and of Lightning, in which Segue keeps a part of its own."""

from __future__ import annotations

import shutil

from segue.integrations.transformers import HandoverCallback

# isort: split
import torch
from safetensors.torch import load_file

import segue

from . import V0_1_0, cases
from .agreement import assert_same_weights


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=cases.Rows()[0]["input_ids"][None]).logits


def test_trainer_goes_on_from_its_checkpoint(tmp_path):
    shutil.copytree(V0_1_0 / "trainer" / "checkpoint-4", tmp_path / "checkpoint-4")
    callback = HandoverCallback(cases.TRAINER_PLAN)
    trainer = cases.trainer(tmp_path, callback)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    wanted = load_file(V0_1_0 / "trainer" / "logits.safetensors")["logits"]
    torch.testing.assert_close(logits(trainer.model), wanted, rtol=1e-3, atol=1e-4)


def test_a_model_that_trainer_saved_is_loaded():
    model = segue.from_pretrained(V0_1_0 / "trainer" / "finished")
    wanted = load_file(V0_1_0 / "trainer" / "logits.safetensors")["logits"]
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-5)


def test_lightning_goes_on_from_its_checkpoint():
    from segue.integrations.lightning import HandoverCallback

    from .lightning_case import Module, loader, trainer

    module = Module()
    trainer(HandoverCallback(cases.GUIDED)).fit(module, loader(), ckpt_path=V0_1_0 / "lightning" / "epoch1.ckpt")
    assert_same_weights(module.model.state_dict(), V0_1_0 / "lightning" / "finished.safetensors")
