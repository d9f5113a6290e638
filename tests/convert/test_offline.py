"""`segue eval`, `segue resume` and `from_pretrained` ask the hub only if their user says so, whatever a record says."""

from __future__ import annotations

import json
import socket

import pytest

import segue
from segue.cli import commands
from segue.convert import evaluate
from segue.convert.options import EvalSettings
from segue.data import Digits, HubDataset, Torchvision
from segue.errors import CheckpointError, ConfigError, DataError
from segue.lab.config import Teacher, config_hash, to_dict
from segue.lab.models import SmallViT, Timm
from segue.lab.tasks import ImageTask
from tests.convert.small_models import record, seal
from tests.helpers import tiny_runs
from tests.helpers.command import runner


class Reached(BaseException):
    """The network is asked; nobody tries again."""


@pytest.fixture
def network(monkeypatch) -> list[str]:
    """Hosts that were asked for; Hugging Face's libraries are online, as for most users."""
    from datasets import config
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", False)
    asked: list[str] = []

    def resolve(host, *_args, **_kwargs):
        asked.append(host)
        raise Reached(host)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return asked


def forge(folder, **conversion) -> None:
    found = record(folder)
    found["conversion"].update(conversion)
    found["base"]["name"] = conversion.get("model", found["base"]["name"])
    (folder / "segue.json").write_text(json.dumps(found))
    seal(folder)


@pytest.mark.parametrize(
    ("said", "kind"),
    [({"model": "someone/original"}, ConfigError), ({"data": "someone/texts"}, DataError)],
    ids=["original", "data"],
)
def test_eval_asks_the_hub_only_with_its_users_flag(said, kind, copied, tmp_path_factory, network):
    out = tmp_path_factory.mktemp("out") / "eval"
    forge(copied, download=True, **said)
    with pytest.raises(kind) as caught:
        evaluate.evaluate(EvalSettings(folder=copied), out)
    assert "--download" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3
    assert network == []
    with pytest.raises(Reached):
        evaluate.evaluate(EvalSettings(folder=copied, download=True), out)
    assert network
    assert not out.exists()


def test_a_converted_model_is_loaded_without_the_network(copied, network):
    forge(copied, download=True)
    segue.from_pretrained(copied)
    assert network == []


def test_eval_compares_the_digest_before_it_opens_the_original(copied, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "eval"
    forge(copied, model="someone/original")
    with pytest.raises(CheckpointError, match="the given digest says"):
        evaluate.evaluate(EvalSettings(folder=copied, digest="0" * 64), out)


@pytest.mark.parametrize("said", [{"model": "someone/original"}, {"data": "someone/texts"}], ids=["original", "data"])
def test_resume_asks_the_hub_only_with_its_users_flag(said, converted, tmp_path, network):
    settings = record(converted)["conversion"] | {"download": True, **said}
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "settings.json").write_text(json.dumps(settings))
    with pytest.raises((ConfigError, DataError)) as caught:
        runner.invoke(commands.app, ["resume", str(tmp_path)], catch_exceptions=False)
    assert len(str(caught.value).splitlines()) == 3
    assert network == []
    with pytest.raises(Reached):
        runner.invoke(commands.app, ["resume", str(tmp_path), "--download"], catch_exceptions=False)


@pytest.mark.parametrize("what", ["hub", "torchvision", "timm"])
def test_a_resumed_run_downloads_nothing_without_the_flag(what, tmp_path, network):
    tasks = {
        "hub": ImageTask(source=HubDataset(id="someone/pictures", download=True), model=SmallViT(depth=1)),
        "torchvision": ImageTask(source=Torchvision(name="MNIST", folder=tmp_path, download=True), model=SmallViT(depth=1)),
        "timm": ImageTask(source=Digits(), model=Timm(name="hf-hub:someone/model")),
    }
    config = tiny_runs.config(task=tasks[what], teacher=Teacher(task=tasks[what], stages=(tiny_runs.HEAD,)))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"config": to_dict(config), "config_hash": config_hash(config)}))
    with pytest.raises((ConfigError, DataError)) as caught:
        runner.invoke(commands.app, ["resume", str(folder)], catch_exceptions=False)
    assert len(str(caught.value).splitlines()) == 3
    assert network == []
    with pytest.raises((Reached, DataError)):  # torchvision has a hint of its own
        runner.invoke(commands.app, ["resume", str(folder), "--download"], catch_exceptions=False)
    assert network != []
