"""A converted folder behind transformers' Auto classes: right after `import segue.convert`, refused without it."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

import segue
import segue.convert
from segue.errors import ConfigError
from tests.compatibility import V0_1_0
from tests.convert.small_models import CLASSES, seal
from tests.helpers.processes import run_python
from tests.helpers.tiny import same_bits

AUTO = {
    "llama": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "labels": "AutoModelForSequenceClassification",
    "vit": "AutoModelForImageClassification",
    "encoder": "AutoModel",
}


@pytest.mark.parametrize("kind", AUTO)
def test_an_auto_class_loads_what_segue_loads(kind, family):
    folder, _ = family(kind)
    loaded = getattr(transformers, AUTO[kind]).from_pretrained(folder)
    wanted = segue.from_pretrained(folder)
    assert type(loaded).__name__ == CLASSES[kind]
    assert not loaded.training
    assert loaded.segue == wanted.segue
    state = wanted.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(same_bits(value, state[name]) for name, value in loaded.state_dict().items())


def test_the_plain_auto_class_leaves_the_head_out(converted):
    loaded = transformers.AutoModel.from_pretrained(converted)
    assert type(loaded).__name__ == "LlamaModel"
    assert type(loaded.layers[0].self_attn).__module__.startswith("segue.students")


def test_types_and_other_settings(converted):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(converted, dtype="bfloat16")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match=r"from_pretrained\(device_map=...\) is not possible") as caught:
        transformers.AutoModelForCausalLM.from_pretrained(converted, device_map="cpu")
    assert len(str(caught.value).splitlines()) == 3
    with pytest.raises(ConfigError, match="AutoModelForMaskedLM cannot load"):
        transformers.AutoModelForMaskedLM.from_pretrained(converted)


def test_its_configuration_holds_that_of_the_original(converted):
    found = transformers.AutoConfig.from_pretrained(converted)
    assert (found.model_type, found.architectures) == ("segue", ["LlamaForCausalLM"])
    saved = json.loads((converted / "segue.json").read_text())["base"]["config"]
    assert found.base_config == saved
    assert saved["model_type"] == "llama"


ALONE = """
import sys
import segue  # lets transformers import beside this torchvision, and nothing else
import transformers
assert "segue.convert" not in sys.modules
folder = sys.argv[1]
for kind in (transformers.AutoConfig, transformers.AutoModel, transformers.AutoModelForCausalLM):
    try:
        kind.from_pretrained(folder)
    except ValueError as error:
        print(kind.__name__, "refuses:", "model type `segue`" in str(error))
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
print(tokenizer.decode(tokenizer("one two")["input_ids"], skip_special_tokens=True))
"""
FIRST = """
import sys
import segue.convert
assert "transformers" not in sys.modules and "torch" not in sys.modules  # nobody waits for them
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
"""


@pytest.mark.processes
def test_transformers_alone_refuses_the_folder(converted):
    said = run_python("-c", ALONE, converted, env={"HF_HUB_OFFLINE": "1"}).stdout.splitlines()
    names = ["AutoConfig", "AutoModel", "AutoModelForCausalLM"]
    assert said == [*(f"{name} refuses: True" for name in names), "one two"]


@pytest.mark.processes
def test_segue_may_be_imported_before_transformers(converted):
    assert run_python("-c", FIRST, converted, env={"HF_HUB_OFFLINE": "1"}).stdout == "LlamaForCausalLM\n"


def test_folders_of_the_layout_before_load_as_they_did(copied, converted):
    """Until today config.json was that of the original: `segue.from_pretrained` reads the record, and both layouts."""
    saved = json.loads((converted / "segue.json").read_text())["base"]["config"]
    (copied / "config.json").write_text(json.dumps(saved))
    seal(copied)
    wanted = segue.from_pretrained(converted).state_dict()
    assert all(same_bits(value, wanted[name]) for name, value in segue.from_pretrained(copied).state_dict().items())
    assert json.loads((V0_1_0 / "conversions" / "converted" / "config.json").read_text())["model_type"] == "llama"


def test_nothing_else_of_transformers_changes(base):
    assert type(transformers.AutoModelForCausalLM.from_pretrained(base("llama"))).__module__.startswith("transformers.")
