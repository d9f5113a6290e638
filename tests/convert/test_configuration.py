"""A folder describes its model by declared fields with plain values, and chooses no code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import transformers

import segue
from segue.convert.configuration import build_config, declared, plain_config
from segue.convert.pretrained import open_base
from segue.errors import CheckpointError, ConfigError, SegueError
from tests.convert.forged import KERNEL, forgeries, write_stand_in
from tests.convert.small_models import CLASSES, config, save
from tests.helpers.processes import run_python


@pytest.mark.processes
def test_no_forged_configuration_reaches_a_kernel_the_network_or_code(copied, tmp_path_factory):
    """Beside a stand-in for `kernels` that records calls; without Segue, the same trick calls it."""
    place = tmp_path_factory.mktemp("site")
    write_stand_in(place)
    (copied / "evil.py").write_text("raise SystemExit('run')\nclass Config: pass\nclass Model: pass\n")
    (copied / "evil.pth").write_bytes(b"cposix\nsystem\n(S'echo owned'\ntR.")
    path = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = json.loads(run_python(Path(__file__).with_name("forged.py"), copied, env={"PYTHONPATH": path}).stdout)
    assert any(KERNEL in call for call in found.pop("without segue"))
    assert set(found) == set(forgeries())
    for name, result in found.items():
        assert result["kernels"] == [], name
        assert result["reached"] == [], name
        assert result["how"] == "loaded" or len(result["how"].splitlines()) == 3, (name, result)
    refused = {name for name, result in found.items() if result["how"] != "loaded"}
    assert refused == {
        "declared",
        "architectures",
        "rope",
        "act",
        "type",
        "timm",
        "timm file",
    }  # what is not declared is dropped


@pytest.mark.parametrize("kind", list(CLASSES))
def test_a_configuration_comes_back_as_it_was(kind):
    original = config(kind)
    again = build_config(json.loads(json.dumps(plain_config(original, CLASSES[kind], torch.float32))))
    left_out = ("dtype", "architectures")
    assert {**again.to_dict(), **dict.fromkeys(left_out)} == {**original.to_dict(), **dict.fromkeys(left_out)}


def test_every_field_of_every_model_type_that_is_read_is_declared_by_its_class():
    """None is one by which transformers chooses code; so it is for whatever version is installed."""
    acted_upon = (
        "attribute_map",
        "auto_map",
        "attn_impl",
        "experts_impl",
        "quantization_config",
        "trust_",
        "custom_",
        "_class",
    )
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for name in list(CONFIG_MAPPING)[::40]:  # each takes a moment
        for field in declared(CONFIG_MAPPING[name]):
            assert not field.startswith(acted_upon), (name, field)
            assert not field.endswith(("_implementation", "_map")) or field == "vocabulary_map", (name, field)


def test_configurations_inside_are_held_to_the_same():
    trick = forgeries()["renamed"] | {"attn_implementation": KERNEL, "auto_map": {"AutoModel": "evil.Model"}}
    inner = {"model_type": "llama", "hidden_size": 64, **trick}
    built = build_config({"model_type": "llava", "text_config": inner, "vision_config": {"hidden_size": 48, **trick}, **trick})
    for each in (built, built.text_config, built.vision_config):
        assert each._attn_implementation is None
        assert not {"attribute_map", "auto_map", "harmless"} & set(vars(each))
    assert isinstance(built.text_config, transformers.LlamaConfig)
    assert (built.text_config.hidden_size, built.vision_config.hidden_size) == (64, 48)


@pytest.mark.parametrize(
    ("saved", "found"),
    [
        ({"model_type": "llama", "hidden_act": "someone/repository"}, "'hidden_act' names a place"),
        ({"model_type": "timm_backbone", "backbone": "hf-hub:someone/x"}, "'backbone' names a place"),
        ({"model_type": "timm_wrapper", "model_args": {"checkpoint_path": "a.pth"}}, "'model_args' has settings that"),
        ({"model_type": "timm_wrapper", "model_args": {"x": [{"y": "z"}]}}, "'model_args' has settings that"),
        ({"model_type": "llama", "hidden_size": "wide"}, "transformers raises"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "\x1b[2J"}}, "'rope_parameters' has control characters"),
        ({"model_type": "llama", "hidden_act": "silu\u202e"}, "'hidden_act' has control characters"),
        ({"model_type": "llama", "is_encoder_decoder": [None]}, "'is_encoder_decoder' is [None], not true or false"),
        ({"model_type": "llama", "attention_bias": "no"}, "not true or false"),
        ({"model_type": "no_such_model"}, "The configuration names it"),
        ({"model_type": ["llama"]}, "The configuration names it"),
        ({}, "The configuration names it"),
    ],
)
def test_what_is_not_plain_is_refused_in_words(saved, found):
    with pytest.raises(CheckpointError) as caught:
        build_config(saved)
    assert found in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3


def test_the_original_is_held_to_the_same(tmp_path):
    """`segue eval` opens the model that a record names."""
    save("llama", tmp_path)
    plain = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**plain, **forgeries()["renamed"], "attn_implementation": KERNEL}))
    assert open_base(str(tmp_path)).model.config._attn_implementation in ("sdpa", "eager")
    (tmp_path / "config.json").write_text(json.dumps({**plain, "hidden_act": KERNEL}))
    with pytest.raises(SegueError):
        open_base(str(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        "3",
        "[]",
        '{"max_new_tokens": "x"}',
        "{",
        '{"eos_token_id": {"a": 1}}',
        '{"use_cache": []}',
        '{"output_hidden_states": "no"}',
        '{"pad_token_id": 1e400}',
        f'{{"eos_token_id": {9**99}}}',
    ],
)
def test_a_broken_generation_config_is_refused_in_words(content, copied):
    (copied / "generation_config.json").write_text(content)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        segue.from_pretrained(copied, verify=False)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e400"])
def test_a_record_has_finite_numbers_only(value, copied):
    record = copied / "segue.json"
    record.write_text(record.read_text().replace('"rms_norm_eps": 1e-06', f'"rms_norm_eps": {value}'))
    with pytest.raises(CheckpointError, match="is no finite number") as caught:
        segue.from_pretrained(copied, verify=False)
    assert len(str(caught.value).splitlines()) == 3
