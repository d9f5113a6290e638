"""The manifest: every file that shapes the model is as it was written, and none was added."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil

import pytest

import segue
from segue.convert import manifest
from segue.errors import CheckpointError
from tests.compatibility import V0_1_0
from tests.convert.small_models import seal

REGIONS = 12  # of every file: a bit and a digit are changed in each


def flips(content: bytes, chance: random.Random) -> list[tuple[str, bytes]]:
    """Change one bit and one digit in every region of a file."""
    found = []
    for region in range(REGIONS):
        begin, end = len(content) * region // REGIONS, len(content) * (region + 1) // REGIONS
        at = chance.randrange(begin, max(end, begin + 1))
        found.append((f"bit {at}", content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]))
        if digits := [at for at in range(begin, end) if content[at : at + 1].isdigit()]:
            at = chance.choice(digits)
            other = chance.choice([digit for digit in b"0123456789" if digit != content[at]])
            found.append((f"digit {at}", content[:at] + bytes([other]) + content[at + 1 :]))
    return found


def test_a_flip_anywhere_in_any_file_is_refused(copied, record_property):
    chance, tried = random.Random(0), 0
    for name in sorted({*manifest.listed(copied), manifest.FILE}):
        content = (copied / name).read_bytes()
        for what, changed in flips(content, chance):
            (copied / name).write_bytes(changed)
            with pytest.raises(CheckpointError) as caught:
                segue.from_pretrained(copied)
            assert len(str(caught.value).splitlines()) == 3, (name, what)
            tried += 1
        (copied / name).write_bytes(content)
    segue.from_pretrained(copied)
    assert tried >= 140
    record_property("figure", f"flipped bits and digits of a converted folder that are refused: {tried} of {tried}")


@pytest.mark.parametrize("name", ["model.safetensors", "segue.json", "tokenizer.json", "manifest.json", "README.md"])
def test_a_file_larger_than_it_can_be_is_refused_before_it_is_read(copied, name):
    os.truncate(copied / name, 1 << 40)  # without a byte on the disk; reading a terabyte would take an hour
    with pytest.raises(CheckpointError, match=r"bytes"):
        segue.from_pretrained(copied)


def test_the_card_shows_the_digest_of_the_manifest(copied):
    digest = hashlib.sha256((copied / "manifest.json").read_bytes()).hexdigest()
    card = (copied / "README.md").read_text()
    assert f"- **Digest**: sha256 of `manifest.json` `{digest}`" in card
    for at in range(0, 64, 7):
        wrong = digest[:at] + ("1" if digest[at] != "1" else "g") + digest[at + 1 :]
        (copied / "README.md").write_text(card.replace(digest, wrong))
        with pytest.raises(CheckpointError, match="README.md says"):
            segue.from_pretrained(copied)


@pytest.mark.parametrize("card", ["# A card of my own", None])
def test_a_card_may_be_rewritten_or_left_out(card, copied):
    (copied / "README.md").unlink() if card is None else (copied / "README.md").write_text(card)
    segue.from_pretrained(copied)


def test_a_digest_that_is_given_must_be_the_folders(copied):
    digest = hashlib.sha256((copied / "manifest.json").read_bytes()).hexdigest()
    segue.from_pretrained(copied, digest=digest)
    config = copied / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-02'))
    seal(copied)  # a forged folder is consistent, but it is another one
    segue.from_pretrained(copied)
    for verify in (True, False):
        with pytest.raises(CheckpointError, match="the given digest says"):
            segue.from_pretrained(copied, digest=digest, verify=verify)


def test_a_folder_of_version_0_1_0_has_no_manifest_and_loads_as_before(tmp_path):
    shutil.copytree(V0_1_0 / "conversions" / "converted", tmp_path / "old")
    segue.from_pretrained(tmp_path / "old")
    with pytest.raises(CheckpointError, match="no digest covers it"):
        segue.from_pretrained(tmp_path / "old", digest="0" * 64)
    (tmp_path / "old" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="config.json has changed"):
        segue.from_pretrained(tmp_path / "old")


@pytest.mark.parametrize(
    "name",
    [
        "chat_template.jinja",
        "additional_chat_templates/mine.jinja",
        "adapter_config.json",
        "adapter_model.safetensors",
        "model-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "modeling_mine.py",
        "custom_generate/generate.py",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "processor_config.json",
    ],
)
def test_an_added_file_is_refused(name, copied):
    (copied / name).parent.mkdir(exist_ok=True)
    (copied / name).write_text("{}")
    with pytest.raises(CheckpointError, match="is not part of it") as caught:
        segue.from_pretrained(copied)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["LICENSE", "NOTES.md", ".gitattributes", "eval/index.html", "photo.png"])
def test_what_nobody_reads_may_be_added(name, copied):
    (copied / name).parent.mkdir(exist_ok=True)
    (copied / name).write_text("mine")
    segue.from_pretrained(copied)


def test_a_link_to_a_folder_and_a_pipe_are_refused(copied, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (copied / "custom_generate").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="custom_generate is not part of it"):
        segue.from_pretrained(copied)
    (copied / "custom_generate").unlink()
    (copied / "generation_config.json").unlink()
    os.mkfifo(copied / "generation_config.json")  # whoever opened it would wait
    with pytest.raises(CheckpointError, match="generation_config.json is missing"):
        segue.from_pretrained(copied)


def test_every_missing_file_is_refused(copied):
    for name in manifest.listed(copied):
        content = (copied / name).read_bytes()
        (copied / name).unlink()
        with pytest.raises(CheckpointError):
            segue.from_pretrained(copied)
        (copied / name).write_bytes(content)
    (copied / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="manifest.json cannot be read"):
        segue.from_pretrained(copied)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"files": 3}', '{"files": {"config.json": 3}}', "[" * 100_000])
def test_a_manifest_that_is_none_is_refused_in_words(content, copied):
    (copied / "manifest.json").write_text(content)
    for verify in (True, False):
        with pytest.raises(CheckpointError, match="manifest.json cannot be read"):
            segue.from_pretrained(copied, verify=verify)


def test_a_name_outside_the_folder_is_not_read(copied, tmp_path_factory):
    """A manifest is as untrusted as the rest: weights are read from the folder itself only."""
    outside = tmp_path_factory.mktemp("outside") / "model.safetensors"
    shutil.copy(copied / "model.safetensors", outside)
    files = manifest.listed(copied)
    files[f"../{outside.parent.name}/model.safetensors"] = files.pop("model.safetensors")
    (copied / "model.safetensors").unlink()
    (copied / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
    with pytest.raises(CheckpointError, match="It has no safetensors file"):
        segue.from_pretrained(copied, verify=False)
