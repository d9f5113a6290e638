"""What is trained on and what is held out: exact counts, nothing in both, and scores that others compute too."""

from __future__ import annotations

import csv
import json
from collections import Counter

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from PIL import Image

from segue.convert import data, texts
from segue.convert.pretrained import open_base
from segue.errors import ConfigError, DataError
from tests.convert.small_models import POSITIONS, epoch, scores, settings, text, tokenizer

ROWS = [(line, int("one" in line)) for line in text(400).split(".\n")]
SENTENCES = [line for line, _ in ROWS]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The same labelled texts in every form, each with names of columns of its own."""
    place = tmp_path_factory.mktemp("tables")
    with (place / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *ROWS])
    (place / "a.tsv").write_text("sentence\tlabel\n" + "".join(f"{line}\t{label}\n" for line, label in ROWS))
    (place / "a.jsonl").write_text("\n".join(json.dumps({"id": 3, "content": line, "labels": label}) for line, label in ROWS))
    (place / "a.json").write_text(json.dumps([{"text": line, "label": label} for line, label in ROWS]))
    columns = {"text": SENTENCES, "label": [label for _, label in ROWS]}
    pyarrow.parquet.write_table(pyarrow.table(columns), place / "a.parquet")
    rows = datasets.Dataset.from_dict(columns)
    rows.save_to_disk(place / "one")
    datasets.DatasetDict({"test": rows.select(range(3)), "train": rows}).save_to_disk(place / "parts")
    (place / "folder").mkdir()
    (place / "folder" / "1.txt").write_text("first")
    (place / "folder" / "2.md").write_text("second")
    (place / "folder" / "3.png").write_bytes(b"no text")
    return place


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json", "a.parquet", "one", "parts"])
def test_every_form_of_table_gives_the_same_texts_and_labels(name, tables):
    found = texts.read_texts(str(tables / name))
    assert found.texts == SENTENCES
    assert found.labels == [label for _, label in ROWS]


def test_columns_of_other_names_are_named(tables, tmp_path):
    (tmp_path / "b.csv").write_text("saying,kind,text\nhello,1,other\n")
    found = texts.read_texts(str(tmp_path / "b.csv"), text="saying", label="kind")
    assert (found.texts, found.labels) == (["hello"], [1])
    assert texts.read_texts(str(tmp_path / "b.csv")).texts == ["other"]


def test_a_dataset_by_its_id_comes_from_the_cache_without_a_network(tmp_path, monkeypatch):
    """`datasets` finds a prepared dataset by its folder's name; the cache is filled as a download fills it."""
    (tmp_path / "source").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": SENTENCES}), tmp_path / "source" / "train.parquet")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.load_dataset("parquet", data_files=str(tmp_path / "source" / "train.parquet"))
    (cached,) = (tmp_path / "cache" / "parquet").iterdir()
    (fingerprint,) = (path for path in cached.glob("*/*") if path.is_dir())
    wanted = tmp_path / "cache" / "someone___sayings" / "default" / "0.0.0" / fingerprint.name
    wanted.parent.mkdir(parents=True)
    fingerprint.rename(wanted)
    for path in wanted.glob("parquet-*"):
        path.rename(path.with_name(path.name.replace("parquet-", "sayings-")))
    assert texts.read_texts("someone/sayings").texts == SENTENCES


def test_a_folder_of_too_many_files_is_refused_before_they_are_read(tables, monkeypatch):
    monkeypatch.setattr(texts, "MOST_FILES", 1)
    with pytest.raises(DataError, match="The folder has more than 1 files"):
        texts.read_texts(str(tables))


def test_a_folder_of_text_files_is_read_in_order(tables):
    assert texts.read_texts(str(tables / "folder")).texts == ["first", "second"]


@pytest.mark.parametrize(
    ("name", "content", "given", "found"),
    [
        ("a.csv", "x,y\n1,2\n", {}, "Its columns are 'x', 'y'."),
        ("a.csv", "x,y\n1,2\n", {"text": "z"}, "Its columns are 'x', 'y'."),
        ("a.csv", "text,y\n1,2\n", {"label": "z"}, "Its columns are 'text', 'y'."),
        ("a.jsonl", '{"text": "a"}\n{"text": 3}\n', {}, "In row 2, 'text' is 3."),
        ("a.jsonl", '{"text": "a"}\n[3]\n', {}, "A row is a list"),
        ("a.jsonl", '{"text": "a"}\n{"text"', {}, "cannot be read"),
        ("a.tsv", "text\tlabel\na\n", {}, "cannot be read"),
        ("a.csv", "text,label\na,good\n", {}, "In row 1 the label is 'good'."),
        ("a.csv", "text,label\na,0.7\n", {}, "In row 1 the label is '0.7'."),
        ("a.jsonl", '{"text": "a", "label": 0.7}', {}, "In row 1 the label is 0.7."),
        ("a.jsonl", "", {}, "It has no text."),
        ("a.pdf", "", {}, "It is neither a file nor a downloaded dataset"),
    ],
)
def test_what_is_no_text_gets_three_lines(name, content, given, found, tmp_path):
    path = tmp_path / name if name != "a.pdf" else tmp_path / "missing.txt"
    if name != "a.pdf":
        path.write_text(content)
    with pytest.raises(DataError) as caught:
        texts.read_texts(str(path), **given)
    assert found in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("kind", ["llama", "masked"])
def test_packed_texts_are_cut_exactly_and_their_end_is_held_out(kind, base, tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(json.dumps({"text": line}) for line in SENTENCES))
    opened, reader = open_base(str(base(kind))), tokenizer()
    found = data.load(opened, settings(source))
    stream = [token for line in SENTENCES for token in [*reader(line, add_special_tokens=False)["input_ids"], 1]]
    count = len(stream) // 16
    held = round(0.1 * count)
    pieces = [tuple(stream[i * 16 : i * 16 + 16]) for i in range(count)]

    def unmasked(batch):
        ids = batch["input_ids"]
        return [*map(tuple, (ids if kind == "llama" else torch.where(ids == 3, batch["labels"], ids)).tolist())]

    trained = [piece for number in range(3) for batch in epoch(found, number) for piece in unmasked(batch)]
    held_out = [piece for batch in found.held_out for piece in unmasked(batch)]
    assert held_out == pieces[-held:]
    assert set(trained) <= set(pieces[:-held])
    assert len(trained) == 3 * ((count - held) // 4 * 4)
    assert len(set(trained)) > 0.9 * len(set(pieces[:-held]))  # other orders leave other pieces out
    assert found.train_size == f"{(count - held) * 16:,} tokens in pieces of 16"
    assert found.held_out_size == f"the last {held * 16:,} tokens"


def test_labelled_texts_are_padded_cut_and_never_in_both_parts(base, tables):
    opened, reader = open_base(str(base("labels"))), tokenizer()
    found = data.load(opened, settings(tables / "a.csv", tokens=6))
    known = Counter((tuple(reader(line, truncation=True, max_length=6)["input_ids"]), label) for line, label in ROWS)
    assert max(len(ids) for ids, _ in known) == 6
    trained, held_out = (
        [
            (tuple(ids[mask == 1].tolist()), label)
            for batch in batches
            for ids, mask, label in zip(batch["input_ids"], batch["attention_mask"], batch["labels"].tolist(), strict=True)
        ]
        for batches in (epoch(found), found.held_out)
    )
    assert Counter(trained) + Counter(held_out) <= known
    held = round(0.1 * len(ROWS))
    assert len(held_out) == held
    assert len(trained) == (len(ROWS) - held) // 4 * 4
    accuracy = sum(
        (opened.model(**{k: v for k, v in batch.items() if k != "labels"}).logits.argmax(-1) == batch["labels"]).sum().item()
        for batch in found.held_out
    )
    assert found.task.of(scores(opened, found)) == pytest.approx(100 * accuracy / held)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    place = tmp_path_factory.mktemp("images")
    for part, count in (("train", 6), ("test", 3)):
        for label, name in enumerate(("dark", "light")):
            (place / part / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (8, 8), (20 * i, 100 * label, 7 * i)).save(place / part / name / f"{i}.png")
    return place


def test_images_come_as_the_models_own_processor_makes_them(base, images):
    opened = open_base(str(base("vit")))
    found = data.load(opened, settings(images))
    processor = transformers.ViTImageProcessor.from_pretrained(base("vit"))
    wanted = {
        tuple(processor(Image.open(path), return_tensors="pt")["pixel_values"].flatten().round(decimals=4).tolist()): label
        for label, name in enumerate(("dark", "light"))
        for path in sorted((images / "test" / name).iterdir())
    }
    seen = {}
    for batch in found.held_out:
        for pixels, label in zip(batch["pixel_values"], batch["labels"].tolist(), strict=True):
            seen[tuple(pixels.flatten().round(decimals=4).tolist())] = label
    assert len(seen) == 6
    close = [min(max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) for theirs in wanted) for mine in seen]
    assert max(close) < 1e-3
    for mine, label in seen.items():
        nearest = min(wanted, key=lambda theirs: max(abs(a - b) for a, b in zip(mine, theirs, strict=True)))
        assert wanted[nearest] == label
    assert (found.train_size, found.held_out_size) == ("12 images", "6 images")


def test_classes_of_a_folder_are_numbered_as_the_model_names_them(base, images, tmp_path):
    """Alphabetical order would evaluate a model that calls 'light' its first class on wrong labels."""
    for path in base("vit").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"id2label": {"0": "light", "1": "dark"}, "label2id": {"light": 0, "dark": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = data.load(open_base(str(tmp_path)), settings(images))
    greens = {}
    for batch in found.held_out:
        for pixels, label in zip(batch["pixel_values"], batch["labels"].tolist(), strict=True):
            greens.setdefault(label, []).append(pixels[1].mean().item())
    assert min(greens[0]) > max(greens[1])


@pytest.mark.parametrize("kind", ["gpt2", "masked"])
def test_pieces_longer_than_the_model_are_refused(kind, base, texts):
    with pytest.raises(ConfigError, match=f"tokens must be at most {POSITIONS}, got {POSITIONS + 1}"):
        data.load(open_base(str(base(kind))), settings(texts, tokens=POSITIONS + 1))


def test_texts_longer_than_the_model_are_cut(base, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": "one " * 200, "label": 1}) for _ in range(4)))
    found = data.load(open_base(str(base("labels"))), settings(tmp_path / "a.jsonl", tokens=1000))
    assert epoch(found)[0]["input_ids"].shape[1] == POSITIONS


@pytest.mark.parametrize(
    ("kind", "rows", "found"),
    [
        ("llama", [{"text": "one"}], "It makes 0 pieces of 16 tokens."),
        ("labels", [{"text": "one", "label": 0}], "It makes 1 texts."),
        ("labels", [{"text": "one"}, {"text": "two"}], "It has no label column."),
        ("labels", [{"text": "one", "label": 0}, {"text": "two", "label": 2}], "Its labels go from 0 to 2."),
        ("labels", [{"text": "one", "label": -1}, {"text": "two", "label": 1}], "Its labels go from -1 to 1."),
    ],
)
def test_data_that_does_not_suit_the_model_is_refused(kind, rows, found, base, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError) as caught:
        data.load(open_base(str(base(kind))), settings(tmp_path / "a.jsonl"))
    assert found in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3
