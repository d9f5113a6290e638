"""`segue eval`: the numbers agree with the conversion's, the wrong original is refused, and nothing unfinished is written."""

import json
import math
import runpy
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import segue
from segue.convert import evaluate, evaluation_page, findings
from segue.convert.data import load
from segue.convert.options import Conversion, EvalSettings
from segue.convert.pretrained import open_base
from segue.errors import CheckpointError, ConfigError, DataError
from tests.convert.small_models import model, save
from tests.helpers.command import call

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "lm_eval_harness.py"


def test_the_quality_is_the_one_that_the_conversion_found(results, converted):
    record = json.loads((converted / "segue.json").read_text())
    for name in ("original", "converted"):
        assert results["perplexity"][name]["mean"] == pytest.approx(math.exp(record["quality"][name]["loss"]), rel=1e-5)
        assert results["accuracy"][name]["mean"] == pytest.approx(record["quality"][name]["accuracy"], abs=1e-6)
    for name in ("kl", "same_first_choice"):
        assert results[name]["mean"] == pytest.approx(record["quality"]["converted"][name], rel=1e-4)
    before, after = (results["perplexity"][name]["mean"] for name in ("original", "converted"))
    assert results["perplexity_ratio"]["mean"] == pytest.approx(after / before)
    assert results["base"] == {"name": record["base"]["name"], "hash": record["base"]["hash"]}


def test_the_page_the_figures_and_the_table_are_there(evaluated, results):
    out, printed = evaluated
    names = {figure.name for figure in evaluation_page.figures(results)}
    assert {path.name for path in out.iterdir()} == {"results.json", "index.html", *(f"{name}.png" for name in names)}
    assert len(names) == 13
    for row in findings.rows(results):
        assert row.what in printed
    assert "which the conversion held out" in " ".join(printed.split())
    assert "has too few positions: 400 tokens" in " ".join(printed.split())
    assert {row["context"] for row in results["speed"]} == {8, 16, 32}
    assert {"versions", "hardware", "seconds"} <= results["meta"].keys()
    branches = {row["without"]: row for row in results["branches"]}
    assert list(branches) == [None, "sinks", "window", "far"]
    assert all("without " + name in printed for name in list(branches)[1:])
    assert branches[None]["kl"]["mean"] == pytest.approx(results["kl"]["mean"], rel=1e-4)  # all texts are few
    assert len({row["kl"]["mean"] for row in branches.values()}) == 4


def test_generation_agrees_with_its_cache_and_the_shares_fall(results):
    greedy = results["greedy"]
    assert greedy["cache_agreement"]["mean"] == 1
    so_far = [one["mean"] for one in greedy["equal_prefix"]]
    assert len(so_far) == greedy["new_tokens"] == 8
    assert all(a >= b for a, b in pairwise(so_far))
    assert sum(so_far) == pytest.approx(greedy["equal_prefix_tokens"]["mean"])
    for far, here in zip(greedy["equal_prefix"], greedy["equal"], strict=True):
        assert far["mean"] <= here["mean"]


def test_longer_pieces_are_cut_from_what_was_held_out(converted, texts, tmp_path):
    record = json.loads((converted / "segue.json").read_text())
    base, settings = open_base(record["base"]["name"]), Conversion.from_dict(record["conversion"])
    held = torch.cat([batch["input_ids"] for batch in load(base, settings).held_out]).flatten()
    wanted = EvalSettings(folder=converted, tokens=48, texts=2)
    pieces = torch.cat([batch["input_ids"] for batch in evaluate.examples(base, load(base, settings), wanted, settings)])
    assert pieces.shape == (2, 48)
    assert torch.equal(pieces.flatten(), held[:96])
    with pytest.raises(ConfigError, match="tokens must be at most 64, got 65"):
        evaluate.evaluate(EvalSettings(folder=converted, tokens=65), tmp_path / "out")
    (tmp_path / "short.txt").write_text(texts.read_text()[:1200])
    with pytest.raises(DataError, match=r"tokens must be at most \d+, got 60"):
        evaluate.evaluate(EvalSettings(folder=converted, tokens=60, data=str(tmp_path / "short.txt")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_original_is_refused_and_nothing_is_written(converted, tmp_path):
    other = model("llama", seed=9)
    save("llama", tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    for base, kind, found in (
        (tmp_path / "other", CheckpointError, "are different: sha256"),
        (tmp_path / "no", ConfigError, "no"),
    ):
        with pytest.raises(kind, match=found) as caught:
            evaluate.evaluate(EvalSettings(folder=converted, base=str(base)), tmp_path / "out")
        assert len(str(caught.value).splitlines()) == 3
        assert "--base" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_damaged_weights_and_folders_of_others_are_refused(copied, base):
    with (copied / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(CheckpointError, match="its hash differs"):
        evaluate.evaluate(EvalSettings(folder=copied), copied / "eval")
    with pytest.raises(CheckpointError, match="an ordinary model"):
        evaluate.evaluate(EvalSettings(folder=base("llama")), copied / "eval")
    assert not (copied / "eval").exists()


@pytest.fixture(scope="module")
def others(family):
    """Evaluate converted models that do not generate by the command."""
    found = {}
    for kind in ("masked", "labels", "encoder", "vit"):
        out, _ = family(kind)
        printed = call("eval", out, *(() if kind == "vit" else ("--contexts", "4,8,1000")))
        found[kind] = out, printed, json.loads((out / "eval" / "results.json").read_text())
    return found


@pytest.mark.parametrize("kind", ["masked", "labels", "vit"])
def test_models_that_choose_are_compared_by_their_choices(others, kind):
    out, printed, found = others[kind]
    record = json.loads((out / "segue.json").read_text())
    for name in ("original", "converted"):
        assert found["loss"][name]["mean"] == pytest.approx(record["quality"][name]["loss"], rel=1e-4)
        right = found["correct"]["both"] + found["correct"][f"{name} alone"]
        assert found["accuracy"][name]["mean"] == pytest.approx(right / found["choices"])
    assert sum(found["correct"].values()) == found["choices"]
    at_every_sureness = [row["same_first_choice"] for row in found["by_confidence"]]
    assert sum(one["n"] for one in at_every_sureness) == found["choices"]
    same = sum(one["n"] * one["mean"] for one in at_every_sureness) / found["choices"]
    assert found["same_first_choice"]["mean"] == pytest.approx(same)
    assert found["kl"]["mean"] > 0
    assert {row["context"] for row in found["speed"]} == ({1, 2, 4, 8} if kind == "vit" else {4, 8})
    assert ("hidden token correct" if kind == "masked" else "accuracy") in printed
    assert {"same_choice.png", "tokens_per_second.png", "index.html"} <= {path.name for path in (out / "eval").iterdir()}
    assert segue.from_pretrained(out) is not None  # the page is in the folder, and the folder still loads


def test_encoders_are_compared_by_their_embeddings(others):
    out, _, found = others["encoder"]
    record = json.loads((out / "segue.json").read_text())
    assert found["cosine"]["mean"] == pytest.approx(record["quality"]["converted"]["cosine"], rel=1e-4)
    assert found["examples"]["count"] == len(found["cosines"]) == len(found["lengths"]) == 24
    assert sum(row["cosine"]["n"] for row in found["by_length"]) == 24
    assert found["by_length"][0]["from"] == min(found["lengths"])
    assert found["by_length"][-1]["to"] == max(found["lengths"])
    assert {"cosine.png", "cosine_by_length.png"} <= {path.name for path in (out / "eval").iterdir()}


def test_at_most_so_many_examples_are_read():
    batches = [{"x": torch.arange(4)}, {"x": torch.arange(4, 8)}]
    assert [batch["x"].tolist() for batch in evaluate._at_most(batches, 5)] == [[0, 1, 2, 3], [4]]
    assert [batch["x"].tolist() for batch in evaluate._at_most(batches, 4)] == [[0, 1, 2, 3]]
    assert len(list(evaluate._at_most(batches, None))) == 2


def test_other_data_is_told_apart_from_what_was_held_out(converted, texts, tmp_path, results):
    found = findings.sentences({**results, "data": {**results["data"], "held_out_by_the_conversion": False}})
    assert any("which may contain data that the conversion was trained on" in sentence for sentence in found)
    assert any("which the conversion held out" in sentence for sentence in findings.sentences(results))


@pytest.mark.filterwarnings("ignore")  # the harness and what it imports
@pytest.mark.parametrize("given", ["steps", "folder"])
def test_a_converted_model_goes_into_the_evaluation_harness(given, converted, monkeypatch, capsys):
    pytest.importorskip("lm_eval")
    arguments = ["--steps", "3"] if given == "steps" else ["--folder", str(converted)]
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, *arguments])
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert [line.rsplit(" ", 1)[0] for line in said] == (
        ["accuracy of the original", "accuracy of the converted model"] if given == "steps" else ["accuracy"]
    )
    assert all(0 <= float(line.rsplit(" ", 1)[1]) <= 1 for line in said)
