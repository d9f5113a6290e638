"""`segue convert`: every family of models in, a folder with the converted one out."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
import transformers
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

import segue
from segue.convert import data
from segue.convert.base import open_base
from tests.convert import gguf_files
from tests.convert.small_models import ATTENTION, CLASSES, call, convert, model, save, text, tokenizer
from tests.helpers.tiny import same_bits

FILES = {"README.md", "config.json", "curve.json", "curve.png", "model.safetensors", "segue.json"}
METHODS = {  # each with a student of its own
    "student_only": "LinearAttention",
    "distillation": "Performer",
    "theseus": "SlidingWindow(window=3)",
    "theseus_gumbel": "Reinit",
    "gumbel_dfg": "Softmax",
    "dcr": "LinearAttention(init=CopyMatching())",
    "dcr_dfg": "GatedMlp",
    "fitnets": "NarrowMlp(ratio=0.5)",
    "lolcats": "WindowedLinear(window=2)",
    "halo": "LowRankMlp(rank=2)",
}


def record(folder):
    return json.loads((folder / "segue.json").read_text())


def points(folder):
    return [json.loads(line) for line in (folder / "training" / "metrics.jsonl").read_text().splitlines()]


def types(path):
    with safe_open(path, "pt") as file:
        return {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


def quality(folder, settings=None):
    """Judge the model of a folder anew, on what its conversion held out, by transformers' own loss."""
    made = record(folder)["conversion"]
    reading = data.Reading(made["data"], made["batch"], made["tokens"], made["validation"], made["seed"])
    held = data.load(open_base(made["model"]), reading).held
    loaded, total, count = segue.from_pretrained(folder), 0.0, 0
    with torch.no_grad():
        for batch in held:
            labels = batch.get("labels", batch["input_ids"])
            counted = int((labels != -100).sum())
            total += loaded(**{**batch, "labels": labels}).loss.item() * counted
            count += counted
    return math.exp(total / count)


def test_the_folder_holds_everything_the_record_names(converted):
    names = {path.name for path in converted.iterdir()}
    assert FILES | {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "training"} == names
    found = record(converted)
    assert found["format"] == 1
    assert set(found["versions"]) >= {"segue", "torch", "transformers"}
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["files"]) == {"config.json", "model.safetensors"}
    assert re.fullmatch("[0-9a-f]{64}", found["base"]["hash"])
    assert found["base"]["hash"] == open_base(found["base"]["name"]).hash
    plan = segue.Plan.from_dict(found["segue"]["plan"])
    assert plan.sites == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert plan.student == segue.students.WindowedLinear(window=4)
    assert plan.guidance == segue.methods.dcr_dfg(sites="*").guidance
    assert found["budget"]["steps"] == 6
    assert found["budget"]["examples"] == 6 * 4
    assert found["budget"]["tokens"] == 6 * 4 * 16
    original, students = found["speed"]["rows"]
    assert (original["model"], students["model"]) == ("original", "converted")
    assert students["cache_bytes"] < original["cache_bytes"]


def test_the_tokenizer_is_the_originals(converted):
    reader = transformers.AutoTokenizer.from_pretrained(converted)
    assert reader("one two, three")["input_ids"] == tokenizer()("one two, three")["input_ids"]


def test_the_original_is_left_as_it_was(converted, base, tmp_path):
    again = save("llama", tmp_path)
    assert {path.name for path in base("llama").iterdir()} == {path.name for path in again.iterdir()}
    assert (base("llama") / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()


def test_only_what_stands_at_the_sites_has_changed(converted, base):
    before, after = load_file(base("llama") / "model.safetensors"), load_file(converted / "model.safetensors")
    around = [name for name in before if ".self_attn." not in name]
    assert len(around) == 13
    assert all(same_bits(before[name], after[name]) for name in around)
    assert {name for name in after if ".self_attn." not in name} == set(around)


def test_the_numbers_of_curve_card_and_terminal_are_those_that_were_measured(converted, place):
    found, seen, said = record(converted), points(converted), (place / "said.txt").read_text()
    curve = json.loads((converted / "curve.json").read_text())
    assert curve == {"original": found["quality"]["original"], "points": seen}
    assert [point["step"] for point in seen] == [0, 3, 6]
    before, after = (math.exp(found["quality"][which]["loss"]) for which in ("original", "converted"))
    assert found["quality"]["name"] == "perplexity"
    assert seen[0]["blend"] == found["quality"]["original"]
    assert seen[-1]["blend"] == seen[-1]["students"] == pytest.approx(found["quality"]["converted"], rel=1e-6)
    assert after == pytest.approx(quality(converted), rel=1e-6)
    for point in seen:
        blend, students = (math.exp(point[side]["loss"]) for side in ("blend", "students"))
        line = f"step {point['step']}, alpha {point['alpha']:.2f}: perplexity of original {before:.4g}, "
        assert line + f"blend {blend:.4g}, students {students:.4g}" in said
    assert f"original: perplexity {before:.4g}" in said
    assert f"as saved: perplexity {after:.4g}" in said
    assert f"| perplexity | {before:.4g} | {after:.4g} |" in (converted / "README.md").read_text()


def test_the_card_says_what_was_done(converted, base, texts):
    card = (converted / "README.md").read_text()
    front = card.split("---")[1]
    assert "library_name: segue" in front
    for words in (
        f"base_model: {base('llama').name}\n",  # not where it lay on the machine of the conversion
        "2 modules of",
        "`model.layers.*.self_attn` (2 sites)",
        "`WindowedLinear(window=4)`",
        "`dcr_dfg`",
        f"`{texts.name}`",
        "6 steps of 4, 384 tokens",
        record(converted)["base"]["hash"][:16],
        "tokens/s, cache",
        "![The curve of the conversion](curve.png)",
        'segue.from_pretrained("',
    ):
        assert words in card, words
    assert str(texts.parent) not in card
    held = int(re.search(r"judged by the last (\d+) tokens", card).group(1))
    train = int(re.search(r": ([\d,]+) tokens in pieces of 16", card).group(1).replace(",", ""))
    assert held / (held + train) == pytest.approx(0.05, abs=0.01)


def test_the_curve_is_a_picture(converted):
    with Image.open(converted / "curve.png") as picture:
        picture.load()
        assert picture.format == "PNG"
        assert min(picture.size) > 400
        assert len(picture.convert("RGB").getcolors(100_000)) > 20


@pytest.fixture(scope="module")
def sources(tmp_path_factory, texts):
    """Data for every family."""
    place = tmp_path_factory.mktemp("sources")
    (place / "labels.csv").write_text(
        "text,label\n" + "\n".join(f"{line},{int('one' in line)}" for line in text(400).split(".\n"))
    )
    for part, count in (("train", 6), ("test", 3)):
        for label, name in enumerate(("dark", "light")):
            (place / "images" / part / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (9, 8), (20 * i, 100 * label, 7 * i)).save(place / "images" / part / name / f"{i}.png")
    return {"labels": place / "labels.csv", "vit": place / "images"}


NAMES = {"masked": "perplexity", "labels": "accuracy", "encoder": "cosine", "vit": "accuracy"}


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "mistral", "masked", "labels", "encoder", "vit"])
def test_every_family_converts_and_reloads(kind, base, texts, sources, tmp_path):
    out = tmp_path / "out"
    said = convert(kind, base(kind), sources.get(kind, texts), out, steps=3, looks=1)
    name, found = NAMES.get(kind, "perplexity"), record(out)
    assert f"original: {name}" in said
    assert f"as saved: {name}" in said
    assert {path.name for path in out.iterdir()} >= FILES
    assert (out / ("preprocessor_config.json" if kind == "vit" else "tokenizer.json")).is_file()
    loaded = segue.from_pretrained(out)
    assert type(loaded).__name__ == CLASSES[kind]
    sites = segue.select(loaded, ATTENTION[kind])
    assert len(sites) == 2
    assert all(type(loaded.get_submodule(site.name)).__module__.startswith("segue.students") for site in sites)
    assert points(out)[-1]["students"] == pytest.approx(found["quality"]["converted"], rel=1e-5)
    assert ("generating" in found["speed"]["of"]) == (kind in ("gpt2", "qwen", "mistral"))
    assert {row["model"] for row in found["speed"]["rows"]} == {"original", "converted"}
    if kind in ("gpt2", "qwen"):
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        assert len([name for name in load_file(out / "model.safetensors") if "wte" in name or "embed" in name]) == 1
    if name == "perplexity":
        assert math.exp(found["quality"]["converted"]["loss"]) == pytest.approx(quality(out), rel=1e-5)


def test_all_methods_have_their_test():
    assert set(METHODS) == set(segue.methods.ALL)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_with_a_student_of_its_own(method, base, texts, tmp_path):
    out, student = tmp_path / "out", METHODS[method]
    sites = "model.layers.*.mlp" if "Mlp" in student else ATTENTION["llama"]
    convert("llama", base("llama"), texts, out, method=method, student=student, sites=sites, steps=3, looks=1)
    loaded, original = segue.from_pretrained(out), model("llama")
    smaller = sum(p.numel() for p in loaded.parameters()) < sum(p.numel() for p in original.parameters())
    assert smaller == (student.startswith(("NarrowMlp", "LowRankMlp")))
    ids = torch.arange(24).reshape(2, 12) * 5 % 290 + 4
    with torch.no_grad():
        given, uncached = (loaded.generate(ids, max_new_tokens=6, do_sample=False, use_cache=use) for use in (True, False))
    assert torch.equal(given, uncached)


def test_kept_layers_stay_as_they_were(base, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(texts.parent)
    convert("llama", base("llama").name, texts.name, tmp_path / "out", keep="model.layers.{0,29}.*", steps=2, looks=1)
    before, after = load_file(base("llama") / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    kept = [name for name in before if name.startswith("model.layers.0.")]
    assert len(kept) == 9
    assert all(same_bits(before[name], after[name]) for name in kept)
    loaded = segue.from_pretrained(tmp_path / "out")
    assert type(loaded.model.layers[0].self_attn).__name__ == "LlamaAttention"
    assert type(loaded.model.layers[1].self_attn).__module__.startswith("segue.")
    card = (tmp_path / "out" / "README.md").read_text()
    assert record(tmp_path / "out")["conversion"]["data"] == str(texts)  # found again from wherever one resumes or evaluates
    assert record(tmp_path / "out")["base"]["name"] == str(base("llama"))
    assert "(1 sites)" in card
    assert "`model.layers.{0,29}.*`" in card


def test_a_span_of_layers_becomes_one(base, texts, tmp_path):
    out = tmp_path / "out"
    convert("llama", base("llama"), texts, out, sites="Span('model.layers', every=2)", student="OneLayer", steps=2, looks=1)
    loaded = segue.from_pretrained(out)
    assert loaded.config.num_hidden_layers == len(loaded.model.layers) == 1
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 1


def test_mixed_precision_accumulation_and_training_all(base, texts, tmp_path):
    out = tmp_path / "out"
    given = {"precision": "bf16", "accumulate": 2, "train": "all", "dtype": "bfloat16", "lr": 0.1, "steps": 2, "looks": 1}
    convert("llama", base("llama"), texts, out, **given)
    before, after = load_file(base("llama") / "model.safetensors"), load_file(out / "model.safetensors")
    assert not torch.equal(before["model.norm.weight"].bfloat16(), after["model.norm.weight"])
    assert types(out / "model.safetensors") == {"BF16"}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert record(out)["base"]["config"]["dtype"] == "bfloat16"
    assert {p.dtype for p in segue.from_pretrained(out).parameters()} == {torch.bfloat16}
    assert record(out)["budget"]["examples"] == 2 * 2 * 4
    assert "2 steps of 8, 256 tokens" in (out / "README.md").read_text()


def test_shards_in_bf16_come_back_in_bf16_also_the_second_time(texts, tmp_path):
    original = model("llama").to(torch.bfloat16)
    original.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    tokenizer().save_pretrained(tmp_path / "base")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    convert("llama", tmp_path / "base", texts, tmp_path / "once", steps=2, looks=1)
    convert("llama", tmp_path / "once", texts, tmp_path / "twice", steps=2, looks=1, student="Performer")
    for name in ("once", "twice"):
        assert types(tmp_path / name / "model.safetensors") == {"BF16"}, name
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "bfloat16", name
        loaded = segue.from_pretrained(tmp_path / name)
        assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
        assert same_bits(loaded.lm_head.weight, original.lm_head.weight)


@pytest.mark.parametrize("quantised", [False, True])
def test_gguf(quantised, texts, tmp_path):
    """With the tokenizer inside the file, or beside it."""
    original = model("llama")
    path = gguf_files.write(tmp_path / "small.gguf", original, None if quantised else tokenizer(), quantised=quantised)
    if quantised:
        tokenizer().save_pretrained(tmp_path)
    opened = open_base(str(path))
    for name, weight in original.state_dict().items():
        found = opened.model.state_dict()[name]
        if not quantised:
            assert same_bits(found, weight), name
        torch.testing.assert_close(found, weight, rtol=0, atol=weight.abs().max().item() / 127 if quantised else 0)
    assert any(not same_bits(opened.model.state_dict()[n], w) for n, w in original.state_dict().items()) == quantised
    convert("llama", path, texts, tmp_path / "out", steps=2, looks=1)
    loaded = segue.from_pretrained(tmp_path / "out")
    assert same_bits(loaded.lm_head.weight, opened.model.lm_head.weight)
    assert types(tmp_path / "out" / "model.safetensors") == {"F32"}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert reader.decode(reader("one two three", add_special_tokens=False)["input_ids"]) == "one two three"


def test_help_shows_every_option(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    shown = call("convert", "--help")
    for name in segue_options():
        assert f"--{name}" in shown, name


def segue_options():
    from segue.convert.convert import Conversion

    return [name for name in Conversion.__dataclass_fields__ if name != "model"] + ["out"]
