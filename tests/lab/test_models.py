"""Models by the name one types, and the small ones of the presets."""

import sys

import pytest
import torch

from segue.core.tensor_files import write
from segue.data import Digits
from segue.errors import ConfigError, DataError, MissingExtraError
from segue.lab.models import SmallViT, Timm, build, example, kinds


@pytest.mark.parametrize("name", ["demo", "timm:test_vit", "test_vit", "torchvision:vit_b_16"])
def test_a_model_of_a_name_has_no_weights_in_memory(name):
    model = build(name)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model(example(model, batch=2, tokens=8)).shape[0] == 2


def test_the_global_generator_stays_as_it_is():
    before = torch.get_rng_state()
    build("demo", "cpu")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("timm:vit_tiny_patch16_225", ["timm has no model 'vit_tiny_patch16_225'.", "Nearest names: vit_tiny_patch16_224"]),
        ("torchvision:vit_b_61", ["torchvision has no model 'vit_b_61'.", "Nearest names: vit_b_16"]),
        ("no/such/folder", ["there is no model 'no/such/folder'.", "write timm:NAME, hf:FOLDER_OR_ID or torchvision:NAME"]),
        ("keras:vit", ["there is no model 'keras:vit'."]),
    ],
)
def test_a_name_that_is_not_known_is_explained(name, texts):
    with pytest.raises(ConfigError) as caught:
        build(name)
    for text in texts:
        assert text in str(caught.value)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingExtraError, match=r"pip install segue\[timm\]"):
        build("timm:test_vit")
    with pytest.raises(MissingExtraError, match=r"the timm model 'test_vit' cannot be built"):
        Timm(name="test_vit")(Digits()(), 32, 0)


def test_modules_that_repeat_are_grouped():
    model = build("demo")
    found = {kind.pattern: kind for kind in kinds(model)}
    attention = found["blocks.*.attn"]
    assert (attention.count, attention.module) == (6, "Attention")
    assert attention.parameters == sum(p.numel() for name, p in model.named_parameters() if ".attn." in name)
    assert "head" not in found


def test_patches_divide_the_image():
    with pytest.raises(ConfigError, match="patch must divide the image size, got 3") as caught:
        SmallViT(patch=3)(Digits()(), None, 0)
    assert "8 x 8 pixels" in str(caught.value)
    assert SmallViT(patch=3)(Digits()(), 9, 0).positions.shape == (1, 9, 48)


def test_a_stem_of_convolutions_makes_the_same_tokens():
    model = SmallViT(patch=4, width=16, depth=1, convolutional=True)
    built = model(Digits()(), None, 0)
    assert built.positions.shape == (1, 4, 16)
    assert built.patches(torch.zeros(2, 1, 8, 8)).shape == (2, 16, 2, 2)
    assert not any(name.endswith("running_mean") for name, _ in built.named_buffers())  # nothing drifts while it is frozen
    assert built(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    for patch in (1, 6):
        with pytest.raises(ConfigError, match=f"another power of 2 with convolutional=True, got {patch}"):
            SmallViT(patch=patch, convolutional=True)(Digits()(), 12, 0)


def test_weights_are_read_from_a_file_and_another_model_is_refused(tmp_path, monkeypatch):
    data = Digits()()
    trained = SmallViT(depth=1)(data, None, 7)
    write(tmp_path / "kept.safetensors", {name: value.half() for name, value in trained.state_dict().items()})
    monkeypatch.setenv("SEGUE_DATA", str(tmp_path))
    loaded = SmallViT(depth=1, weights="kept.safetensors")(data, None, 0)
    for name, value in loaded.state_dict().items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, trained.state_dict()[name].half().float(), rtol=0, atol=0)
    with pytest.raises(ConfigError, match="the weights 'kept.safetensors' cannot be loaded") as caught:
        SmallViT(depth=2, weights="kept.safetensors")(data, None, 0)
    assert "of this very model" in str(caught.value)
    with pytest.raises(DataError, match="There is no file other.safetensors"):
        SmallViT(depth=1, weights="other.safetensors")(data, None, 0)
