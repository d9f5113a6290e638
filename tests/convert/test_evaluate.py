"""`segue eval`: the numbers are those of naive loops, the wrong original is refused, and the page holds what was found."""

import base64
import hashlib
import io
import json
import math
import re
import runpy
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import segue
from segue.convert import compare_causal as judge_causal
from segue.convert import compare_others as judge_others
from segue.convert import evaluate as judge
from segue.convert import evaluation_figures as judge_figures
from segue.convert import evaluation_page as judge_page
from segue.convert import evaluation_text as judge_words
from segue.convert import speed
from segue.convert.base import open_base
from segue.convert.convert import Conversion
from segue.convert.data import load
from segue.errors import CheckpointError, ConfigError, DataError
from tests.convert.small_models import call, convert, model, save

EXAMPLE = Path(__file__).parents[2] / "examples" / "lm_eval_harness.py"


@pytest.fixture(scope="module")
def judged(converted, tmp_path_factory):
    """Judge the converted Llama by the command; return the folder of the page and what was printed."""
    out = tmp_path_factory.mktemp("judged")
    return out, call("eval", converted, "--out", out, "--contexts", "8,16,32,400")


@pytest.fixture(scope="module")
def results(judged):
    return json.loads((judged[0] / "results.json").read_text())


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 300, (5, 14), generator=torch.Generator().manual_seed(3))


def test_the_quality_is_the_one_that_the_conversion_found(results, converted):
    record = json.loads((converted / "segue.json").read_text())
    for name in ("original", "converted"):
        assert results["perplexity"][name]["mean"] == pytest.approx(math.exp(record["quality"][name]["loss"]), rel=1e-5)
        assert results["hit"][name]["mean"] == pytest.approx(record["quality"][name]["accuracy"], abs=1e-6)
    before, after = (results["perplexity"][name]["mean"] for name in ("original", "converted"))
    assert results["perplexity_ratio"]["mean"] == pytest.approx(after / before)
    assert results["base"] == {"name": record["base"]["name"], "hash": record["base"]["hash"]}


def test_the_page_the_figures_and_the_table_are_there(judged, results):
    out, printed = judged
    names = {figure.name for figure in judge_figures.figures(results)}
    assert {path.name for path in out.iterdir()} == {"results.json", "index.html", *(f"{name}.png" for name in names)}
    assert len(names) == 9
    for row in judge_words.rows(results):
        assert row.what in printed
    assert "which the conversion held out" in " ".join(printed.split())
    assert "no positions for it: 400 tokens" in " ".join(printed.split())
    assert {row["context"] for row in results["speed"]} == {8, 16, 32}
    assert {"versions", "hardware", "seconds"} <= results["meta"].keys()


def test_generation_agrees_with_its_cache_and_the_shares_fall(results):
    greedy = results["greedy"]
    assert greedy["cache_changes_nothing"]["mean"] == 1
    so_far = [one["mean"] for one in greedy["equal_so_far"]]
    assert len(so_far) == greedy["new_tokens"] == 8
    assert all(a >= b for a, b in pairwise(so_far))
    assert sum(so_far) == pytest.approx(greedy["first_tokens_equal"]["mean"])
    for far, here in zip(greedy["equal_so_far"], greedy["equal"], strict=True):
        assert far["mean"] <= here["mean"]


def test_losses_choices_and_divergence_are_those_of_a_naive_loop(ids):
    models = {"original": model("llama", 0), "converted": model("llama", 1)}
    with torch.no_grad():
        found = judge_causal.token_by_token(models, ids)
        for text in range(5):
            for position in range(1, 14):
                before, truth = ids[text : text + 1, :position], ids[text, position]
                p, q = (each(input_ids=before).logits[0, -1].double().softmax(-1) for each in models.values())
                at = (text, position - 1)
                assert found["loss_original"][at] == pytest.approx(-p[truth].log().item(), rel=1e-4)
                assert found["loss_converted"][at] == pytest.approx(-q[truth].log().item(), rel=1e-4)
                assert found["kl"][at] == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-3, abs=1e-5)
                assert found["same"][at] == (p.argmax() == q.argmax())
                assert found["hit_converted"][at] == (q.argmax() == truth)


def test_a_model_agrees_with_itself(ids):
    same = model("llama")
    found = judge_causal.measure({"original": same, "converted": same}, ids, (8,), 64)
    assert (
        found["perplexity_ratio"]["mean"] == found["same_first_choice"]["mean"] == found["greedy"]["equal_tokens"]["mean"] == 1
    )
    assert found["kl"]["mean"] == pytest.approx(0, abs=1e-6)
    assert found["perplexity"]["original"] == found["perplexity"]["converted"]


def test_continuations_are_those_of_a_naive_loop_whatever_the_models_own_settings_say(ids):
    greedy = model("llama")
    greedy.generation_config.update(do_sample=True, repetition_penalty=5.0, eos_token_id=list(range(300)))
    found = judge_causal.continued(greedy, ids[:2], 6, cached=True)
    expected = ids[:2]
    with torch.no_grad():
        for _ in range(6):
            expected = torch.cat([expected, greedy(input_ids=expected).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, expected[:, 14:])


@pytest.mark.parametrize("last", [1, 2, 3, 4, 15, 16, 100, 1023])
def test_every_position_is_in_one_bin(last):
    bins = judge_causal.position_bins(last)
    assert [position for a, b in bins for position in range(a, b + 1)] == list(range(1, last + 1))


def test_longer_pieces_are_cut_from_what_was_held_out(converted, texts, tmp_path):
    record = json.loads((converted / "segue.json").read_text())
    base, settings = open_base(record["base"]["name"]), Conversion(**record["conversion"])
    held = torch.cat([batch["input_ids"] for batch in load(base, settings.reading()).held]).flatten()
    asked = judge.Judging(folder=converted, tokens=48, texts=2)
    reading = judge._reading(asked, record, base)
    pieces = torch.cat([batch["input_ids"] for batch in judge._examples(base, load(base, reading), asked, reading)])
    assert pieces.shape == (2, 48)
    assert torch.equal(pieces.flatten(), held[:96])
    with pytest.raises(ConfigError, match="reads 64 at most"):
        judge.judge(judge.Judging(folder=converted, tokens=65), tmp_path / "out")
    (tmp_path / "short.txt").write_text(texts.read_text()[:1200])
    with pytest.raises(DataError, match="pieces of 60 tokens were asked for."):
        judge.judge(judge.Judging(folder=converted, tokens=60, data=str(tmp_path / "short.txt")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_original_is_refused_and_nothing_is_written(converted, tmp_path):
    other = model("llama", seed=9)
    save("llama", tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    for base, kind, found in (
        (tmp_path / "other", CheckpointError, "are others: sha256"),
        (tmp_path / "no", ConfigError, "no"),
    ):
        with pytest.raises(kind, match=found) as caught:
            judge.judge(judge.Judging(folder=converted, base=str(base)), tmp_path / "out")
        assert len(str(caught.value).splitlines()) == 3
        assert "--base" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_damaged_weights_and_folders_of_others_are_refused(copied, base):
    with (copied / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(CheckpointError, match="its hash differs"):
        judge.judge(judge.Judging(folder=copied), copied / "eval")
    with pytest.raises(CheckpointError, match="an ordinary model"):
        judge.judge(judge.Judging(folder=base("llama")), copied / "eval")
    assert not (copied / "eval").exists()


def test_contexts_are_numbers_that_fit():
    assert judge.sizes(None) is None
    assert judge.sizes("64, 16,64") == (16, 64)
    for text in ("", "a", "1,-2", "0"):
        with pytest.raises(ConfigError, match="not numbers of tokens"):
            judge.sizes(text)
    assert judge_causal._within((16, 1000), 64) == [16]
    assert judge_causal._within(None, 64) == [19, 38]
    assert judge_causal._within(None, None) == list(judge_causal.CONTEXTS)
    with pytest.raises(ConfigError, match="64 positions"):
        judge_causal._within((60,), 64)


def test_a_cache_grows_with_the_context_and_a_state_does_not():
    models = {"grown": model("llama"), "flat": model("llama")}
    plan = segue.methods.dcr(sites="**.self_attn", student=segue.students.LinearAttention())
    segue.replace_(models["flat"], plan, total_steps=1).finalize_(force=True)
    rows = speed.decoding(models, (8, 32), steps=2)
    sizes = {(row["model"], row["context"]): row["cache_bytes"] for row in rows}
    token = 2 * 2 * 16 * 4  # keys and values of two layers, one head of 16 numbers in float32
    assert sizes["grown", 32] == (32 + 3) * token  # three more were generated
    assert sizes["flat", 32] == sizes["flat", 8]
    for row in rows:
        assert row["middle_half"][0] <= row["tokens_per_second"] <= row["middle_half"][1]
        assert speed.peak_bytes(models[row["model"]], row["context"]) > row["cache_bytes"] / 2


@pytest.fixture(scope="module")
def others(place, base, texts):
    """Convert models that do not generate, each in two steps, and judge each by the command."""
    sources = place / "judged sources"
    labelled = [f"{line},{int('one' in line)}" for line in texts.read_text().split(".\n")[:120]]
    for part, count in (("train", 6), ("test", 5)):
        for label, name in enumerate(("dark", "light")):
            (sources / part / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (8, 8), (20 * i, 100 * label, 7 * i)).save(sources / part / name / f"{i}.png")
    (sources / "labels.csv").write_text("text,label\n" + "\n".join(labelled))
    data = {"masked": texts, "labels": sources / "labels.csv", "encoder": sources / "labels.csv", "vit": sources}
    found = {}
    for kind, file in data.items():
        out = place / f"judged {kind}"
        convert(kind, base(kind), file, out, steps=2, looks=1, validation=0.2)
        printed = call("eval", out, *(() if kind == "vit" else ("--contexts", "4,8,1000")))
        found[kind] = out, printed, json.loads((out / "eval" / "results.json").read_text())
    return found


@pytest.mark.parametrize("kind", ["masked", "labels", "vit"])
def test_models_that_choose_are_compared_by_their_choices(others, kind):
    out, printed, found = others[kind]
    record = json.loads((out / "segue.json").read_text())
    for name in ("original", "converted"):
        assert found["loss"][name]["mean"] == pytest.approx(record["quality"][name]["loss"], rel=1e-4)
        right = found["right"]["both"] + found["right"][f"{name} alone"]
        assert found["hit"][name]["mean"] == pytest.approx(right / found["choices"])
    assert sum(found["right"].values()) == found["choices"]
    at_every_sureness = [row["same_first_choice"] for row in found["sureness"]]
    assert sum(one["n"] for one in at_every_sureness) == found["choices"]
    same = sum(one["n"] * one["mean"] for one in at_every_sureness) / found["choices"]
    assert found["same_first_choice"]["mean"] == pytest.approx(same)
    assert found["kl"]["mean"] > 0
    assert {row["context"] for row in found["speed"]} == ({1, 2, 4, 8} if kind == "vit" else {4, 8})
    assert ("hidden token guessed" if kind == "masked" else "accuracy") in printed
    assert {"same_choice.png", "tokens_per_second.png", "index.html"} <= {path.name for path in (out / "eval").iterdir()}
    assert segue.from_pretrained(out) is not None  # the page lies in the folder, and the folder still loads


def test_encoders_are_compared_by_their_embeddings(others):
    out, _, found = others["encoder"]
    record = json.loads((out / "segue.json").read_text())
    assert found["cosine"]["mean"] == pytest.approx(record["quality"]["converted"]["cosine"], rel=1e-4)
    assert found["examples"]["count"] == len(found["cosines"]) == len(found["lengths"]) == 24
    assert sum(row["cosine"]["n"] for row in found["by_length"]) == 24
    assert found["by_length"][0]["from"] == min(found["lengths"])
    assert found["by_length"][-1]["to"] == max(found["lengths"])
    assert {"cosine.png", "cosine_by_length.png"} <= {path.name for path in (out / "eval").iterdir()}


def test_neighbours_are_those_of_a_naive_search():
    vectors = F.normalize(torch.randn(7, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    nearest = [max((j for j in range(7) if j != i), key=lambda j, i=i: vectors[i] @ vectors[j]) for i in range(7)]
    assert judge_others._neighbours(vectors).tolist() == nearest


def test_at_most_so_many_examples_are_read():
    batches = [{"x": torch.arange(4)}, {"x": torch.arange(4, 8)}]
    assert [batch["x"].tolist() for batch in judge._at_most(batches, 5)] == [[0, 1, 2, 3], [4]]
    assert [batch["x"].tolist() for batch in judge._at_most(batches, 4)] == [[0, 1, 2, 3]]
    assert len(list(judge._at_most(batches, None))) == 2


def test_the_page_fetches_nothing_and_reads_nothing_as_html(results):
    nasty = "</title><script>alert(1)</script>@@ROWS@@"
    page = judge_page.page({**results, "data": {**results["data"], "name": nasty}, "base": {"name": nasty}}, [])
    assert "<script>alert" not in page
    assert page.count("@@ROWS@@") == 3  # twice the title, and in a sentence, as text
    assert not re.search(r"(src|href)=.(https?:|//)", page)
    for tag in ("style", "script"):
        content = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in page


def test_figures_come_on_light_and_on_dark_paper(results):
    figure = judge_figures.figures(results)[0]
    for paper in (judge_figures.LIGHT, judge_figures.DARK):
        with Image.open(io.BytesIO(figure.png(paper))) as picture:
            assert "#{:02x}{:02x}{:02x}".format(*picture.convert("RGB").getpixel((2, 2))) == paper.paper


def test_other_data_is_told_apart_from_what_was_held_out(converted, texts, tmp_path, results):
    words = judge_words.sentences({**results, "data": {**results["data"], "held_out_by_the_conversion": False}})
    assert any("whether the conversion saw it is not known" in sentence for sentence in words)
    assert any("which the conversion held out" in sentence for sentence in judge_words.sentences(results))


@pytest.mark.filterwarnings("ignore")  # the harness and what it imports
@pytest.mark.parametrize("given", ["steps", "folder"])
def test_a_converted_model_goes_into_the_evaluation_harness(given, converted, monkeypatch, capsys):
    pytest.importorskip("lm_eval")
    words = ["--steps", "3"] if given == "steps" else ["--folder", str(converted)]
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, *words])
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert [line.rsplit(" ", 1)[0] for line in said] == (
        ["accuracy of the original", "accuracy of the converted model"] if given == "steps" else ["accuracy"]
    )
    assert all(0 <= float(line.rsplit(" ", 1)[1]) <= 1 for line in said)
