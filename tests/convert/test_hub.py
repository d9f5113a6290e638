"""push_to_hub: a converted folder on a stand-in hub, and back from there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import segue.convert
from segue.errors import CheckpointError, ConfigError
from tests.convert import hub_server
from tests.helpers.processes import run_python

PUSH = """
import json, sys
import segue.convert
folder, name, cache = sys.argv[1:]
print(segue.convert.push_to_hub(folder, name, private=True, message="Six steps"))
from transformers import AutoModelForCausalLM
loaded = AutoModelForCausalLM.from_pretrained(name, cache_dir=cache)
wanted = segue.from_pretrained(folder).state_dict()
print(all(value.equal(wanted[key]) for key, value in loaded.state_dict().items()), type(loaded).__name__)
"""


def environment(hub: hub_server.Hub, token: str, home: Path) -> dict[str, str]:
    off = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {"HF_ENDPOINT": hub.address, "HF_TOKEN": token, "HF_HOME": str(home), **off}


@pytest.mark.processes
def test_a_pushed_folder_is_complete_and_loads_from_the_hub(converted, tmp_path):
    with hub_server.serving(token="hf_right") as hub:
        said = run_python("-c", PUSH, converted, "me/small", tmp_path / "cache", env=environment(hub, "hf_right", tmp_path))
        assert said.stdout.splitlines() == [f"{hub.address}/me/small", "True LlamaForCausalLM"]
        assert hub.commits == ["Six steps"]
        files = hub.models["me/small"]
    assert {*json.loads(files["manifest.json"])["files"]} <= {*files}
    assert not [name for name in files if name.startswith("training")]
    assert all(content == (converted / name).read_bytes() for name, content in files.items())


@pytest.mark.processes
def test_a_wrong_token_is_refused_in_three_lines(converted, tmp_path):
    code = """
import sys, segue.convert, segue.errors
try:
    segue.convert.push_to_hub(sys.argv[1], "me/small")
except segue.errors.ConfigError as error:
    print(error)
"""
    with hub_server.serving(token="hf_right") as hub:
        said = run_python("-c", code, converted, env=environment(hub, "hf_wrong", tmp_path)).stdout.splitlines()
        assert hub.models == {}
    assert len(said) == 3
    assert said[0] == f"{converted} cannot be pushed to 'me/small'."
    assert "401" in said[1]


def test_only_a_complete_folder_is_pushed(copied, tmp_path):
    (copied / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be loaded as a converted model"):
        segue.convert.push_to_hub(copied, "me/small")
    with pytest.raises(ConfigError, match=r"cannot be pushed.\n  It has no segue.json"):
        segue.convert.push_to_hub(tmp_path / "none", "me/small")
