"""Run configurations: every scale, experiment, variant and data source of version 0.1.0."""

from __future__ import annotations

import json

import pytest

from segue.errors import SegueError

from . import RENAMED, V0_1_0, config_hash, from_dict, to_dict, unsaved
from .agreement import assert_agrees

CONFIGS = json.loads((V0_1_0 / "run_configs.json").read_text(encoding="utf-8"))
OWN = "the user's own"


def kinds(data):
    if isinstance(data, dict):
        return {data["kind"]}.union(*map(kinds, data.values())) if "kind" in data else set().union(*map(kinds, data.values()))
    return set().union(*map(kinds, data)) if isinstance(data, list) else set()


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != OWN])
def test_a_configuration_is_rebuilt_as_it_was(name):
    data = CONFIGS[name]["config"]
    if gone := [kind for kind in kinds(data) if kind in RENAMED and RENAMED[kind] is None]:
        with pytest.raises(SegueError, match=gone[0]):
            from_dict(data)
        return
    run = from_dict(data)
    assert_agrees(data, run)
    again = json.loads(json.dumps(to_dict(run)))
    assert unsaved(again) == unsaved(data) == []
    assert from_dict(again) == run
    assert config_hash(from_dict(again)) == config_hash(run)


def test_hashes_are_what_they_were():
    loaded = {name: entry for name, entry in CONFIGS.items() if name != OWN and not _is_gone(entry)}
    now = {name: config_hash(from_dict(entry["config"])) for name, entry in loaded.items()}
    assert now == {name: entry["config_hash"] for name, entry in loaded.items()}


def _is_gone(entry):
    return any(kind in RENAMED and RENAMED[kind] is None for kind in kinds(entry["config"]))


def test_parts_of_the_users_own_are_named_and_refused():
    data = CONFIGS[OWN]["config"]
    assert unsaved(data) == ["plan.student (own_student)", "task.augment (batch)"]
    with pytest.raises(SegueError, match="own_student"):
        from_dict(data)
