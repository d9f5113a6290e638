"""`segue convert` on data from the original itself, on chats, with files to evaluate on, and with the teacher on disk."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch

import segue
from segue.cli import commands
from segue.convert import sampling
from segue.convert.convert import Conversion
from segue.convert.convert import convert as in_python
from segue.convert.data import load
from segue.convert.folder import evaluated
from segue.convert.pretrained import open_base
from segue.core.tensor_files import read
from segue.errors import ConfigError, PlanError
from tests.convert.small_models import ATTENTION, convert, points, record, save, text, tokenizer
from tests.convert.test_chat import CHATML, ROWS, messages
from tests.helpers.command import call, runner
from tests.helpers.processes import Ranks
from tests.helpers.tiny import same_bits

pytestmark = pytest.mark.slow

SMALL = {"steps": 3, "evaluations": 1, "tokens": 16}


@pytest.fixture
def others(tmp_path) -> tuple[Path, Path]:
    """Two further files of texts."""
    paths = tmp_path / "second.txt", tmp_path / "third.jsonl"
    paths[0].write_text(text(400, seed=7))
    paths[1].write_text("\n".join(json.dumps({"text": text(60, seed=seed)}) for seed in range(8, 12)))
    return paths


def perplexity(model: torch.nn.Module, content: str, tokens: int = 16, end: tuple[int, ...] = (1,)) -> float:
    """Cut a text into pieces and score them by transformers' own loss."""
    stream = [*tokenizer()(content, add_special_tokens=False)["input_ids"], *end]
    pieces = torch.tensor(stream[: len(stream) // tokens * tokens]).view(-1, tokens)
    with torch.no_grad():
        return math.exp(sum(model(input_ids=each[None], labels=each[None]).loss.item() for each in pieces) / len(pieces))


def test_a_model_converts_on_its_own_samples_and_is_evaluated_on_others(base, tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "AT_ONCE", 8)
    out = tmp_path / "out"
    said = convert("llama", base("llama"), "self", out, **SMALL, validation=0.2)
    assert "training on 192 tokens in sequences of 16, sampled from the original after its EOS token" in said
    assert "sampling 16 sequences of 16 tokens from the original" in said
    assert "`self`: 192 tokens in sequences of 16, sampled from the original" in (out / "README.md").read_text()
    shown = call("eval", out, "--contexts", "8", "--tokens", "16")
    assert "3 pieces of 16 tokens of self, which the conversion held out" in " ".join(shown.split())
    samples = [read(path)["ids"] for path in sorted((out / "training" / "self").rglob("*.safetensors"))]
    held_out = torch.cat(samples)[12:15].long()
    loaded = segue.from_pretrained(out)
    with torch.no_grad():
        mean = sum(loaded(input_ids=each[None], labels=each[None]).loss.item() for each in held_out) / 3
    assert record(out)["quality"]["converted"]["loss"] == pytest.approx(mean, rel=1e-4)


def test_eval_names_the_file_that_was_held_out(base, texts, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other.txt"
    other.write_text("the quick brown fox " * 20)
    convert("llama", base("llama"), texts, out, **SMALL, validation=other)
    shown = "".join(call("eval", out, "--contexts", "8", "--tokens", "16").split())
    assert f"tokensof{other},whichtheconversionheldout" in shown
    assert str(texts) not in shown


def test_an_interrupted_sampling_is_resumed_by_segue_resume(base, tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "AT_ONCE", 8)
    straight, stopped = tmp_path / "a", tmp_path / "b"
    convert("llama", base("llama"), "self", straight, **SMALL)
    real, calls = sampling.generate, []

    def interrupted(*given):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(sampling, "generate", interrupted)
    settings = Conversion.from_dict(record(straight)["conversion"])
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        in_python(settings, stopped, said.append)
    assert said[-1] == f"To resume, repeat the command, or: segue resume {stopped}"
    call("resume", stopped)
    assert len(calls) == 3
    assert (straight / "model.safetensors").read_bytes() == (stopped / "model.safetensors").read_bytes()


def test_a_dry_run_samples_one_batch_and_says_how_long_all_take(base, tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "AT_ONCE", 8)
    real, calls = sampling.generate, []
    monkeypatch.setattr(sampling, "generate", lambda *given: calls.append(1) or real(*given))
    said = convert("llama", base("llama"), "self", tmp_path / "out", **{**SMALL, "steps": 100}, dry_run=True)
    assert len(calls) == 1
    assert "sampling 424 sequences of 16 tokens from the original" in said  # 400 and their twentieth part, in batches of 8
    assert not (tmp_path / "out").exists()


def test_chats_convert_and_are_evaluated(tmp_path):
    place = save("llama", tmp_path / "model")
    reader = tokenizer()
    reader.chat_template = CHATML
    reader.save_pretrained(place)
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": messages(turns)}) for turns in ROWS * 3))
    out = tmp_path / "out"
    said = convert("llama", place, tmp_path / "chats.jsonl", out, **{**SMALL, "tokens": 64}, method="distillation")
    assert "11 chats of at most 64 tokens" in said
    assert record(out)["budget"]["tokens"] is None
    assert (out / "chat_template.jinja").read_text() == CHATML
    shown = runner.invoke(
        commands.app, ["eval", str(out), "--contexts", "8", "--tokens", "8", "--json"], catch_exceptions=False
    )
    assert json.loads(shown.stdout) == json.loads((out / "eval" / "results.json").read_text()), "and nothing else on stdout"
    assert json.loads(shown.stdout)["data"]["tokens"] == 8


def test_evaluations_read_as_many_batches_of_further_files_as_of_the_held_out_data(base, texts, tmp_path):
    out = tmp_path / "out"
    convert("llama", base("llama"), texts, out, **SMALL, evaluate_on=[texts], eval_batches=1)
    last, saved = points(out)[-1]["evaluated_on"][str(texts)], record(out)["evaluated_on"][str(texts)]
    found = load(open_base(str(base("llama"))), Conversion.from_dict(record(out)["conversion"]))
    assert len(list(found.evaluated_on[str(texts)])) > 1
    first = [next(iter(found.evaluated_on[str(texts)]))]
    converted = segue.from_pretrained(out)
    assert last["loss"] == pytest.approx(evaluated(converted, first, found.task)["loss"], rel=1e-4)
    assert last["loss"] != pytest.approx(saved["converted"]["loss"], rel=1e-4)  # which is of all


def test_a_validation_file_and_further_files_have_scores_of_their_own(base, texts, others, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    given = {"validation": others[0].name, "evaluate_on": [others[1].name, texts]}
    said = convert("llama", base("llama"), texts, out, **SMALL, **given)
    found, loaded = record(out), segue.from_pretrained(out)
    assert found["conversion"]["validation"] == str(others[0])  # found again from wherever one resumes or evaluates
    assert found["conversion"]["evaluate_on"] == [str(others[1]), str(texts)]
    assert math.exp(found["quality"]["converted"]["loss"]) == pytest.approx(perplexity(loaded, others[0].read_text()), rel=1e-4)
    third = [json.loads(line)["text"] for line in others[1].read_text().splitlines()]
    joined = "<end>".join(third)
    original = open_base(str(base("llama"))).model
    for model, name in ((loaded, "converted"), (original, "original")):
        scores = found["evaluated_on"][str(others[1])][name]
        assert math.exp(scores["loss"]) == pytest.approx(perplexity(model, joined), rel=1e-4)
    last = points(out)[-1]["evaluated_on"]
    assert last[str(others[1])]["loss"] == pytest.approx(found["evaluated_on"][str(others[1])]["converted"]["loss"], rel=1e-4)
    assert re.search(r"; on third.jsonl students [\d.]+, KL [\d.e-]+, same first choice [\d.]+ %", said)
    card = (out / "README.md").read_text()
    assert "| perplexity on `third.jsonl` |" in card
    assert "| perplexity on `text.txt` |" in card
    assert "| KL divergence from the original on `third.jsonl`, nats | 0 |" in card
    assert "| same first choice as the original on `text.txt` | 100 % |" in card
    assert "tokens of second.txt, never trained on" in card
    shown = call("eval", out, "--contexts", "8", "--tokens", "16")
    assert "which the conversion held out" in " ".join(shown.split())


def test_nothing_is_held_out_of_the_data_beside_a_validation_file(base, texts, others, tmp_path):
    said = [
        convert("llama", base("llama"), texts, tmp_path / str(i), **{**SMALL, **given})
        for i, given in enumerate(({"validation": others[0]}, {"validation": 0.5}))
    ]
    counts = [int(each.split("training on ")[1].split(" tokens")[0].replace(",", "")) for each in said]
    assert counts[0] > 1.5 * counts[1]


def test_a_cached_teacher_gives_the_students_of_the_running_one(base, texts, tmp_path):
    given = {**SMALL, "method": "distillation", "steps": 4}
    said = {
        k: convert("llama", base("llama"), texts, tmp_path / str(k), **given, teacher_cache=k) for k in (None, 300, 1)
    }  # of a vocabulary of 300
    running, complete, coarse = (read(tmp_path / str(k) / "model.safetensors") for k in said)
    distances = [math.hypot(*((x - each[name]).norm().item() for name, x in running.items())) for each in (complete, coarse)]
    assert 10 * distances[0] < distances[1]
    assert "teacher cache" not in said[None]
    size = re.search(r"teacher cache: ([\d,]+) tokens, .+, (\d+) bytes for a token", said[300])
    assert 6 * 300 + 2 <= int(size.group(2)) <= 6 * 300 + 2 + 4  # and the key of each example
    trained = re.search(r"training on ([\d,]+) tokens", said[300])
    counts = [int(found.group(1).replace(",", "")) for found in (size, trained)]
    assert 0.95 * counts[1] < counts[0] <= counts[1]  # equal pieces are kept once


def test_a_cached_conversion_resumes_bit_for_bit(base, texts, tmp_path):
    settings = Conversion(
        model=str(base("llama")),
        sites=ATTENTION["llama"],
        student="LinearAttention",
        data=str(texts),
        method="distillation",
        batch=4,
        tokens=16,
        steps=4,
        evaluations=4,
        teacher_cache=8,
    )
    in_python(settings, tmp_path / "straight", lambda _: None)
    lines: list[str] = []

    def stops(line: str) -> None:
        lines.append(line)
        if line.startswith("step 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_python(settings, tmp_path / "stopped", stops)
    in_python(settings, tmp_path / "stopped", lambda _: None)
    a, b = (read(tmp_path / name / "model.safetensors") for name in ("straight", "stopped"))
    assert all(same_bits(x, b[name]) for name, x in a.items())


@pytest.mark.parametrize(
    ("kind", "given", "error", "said"),
    [
        ("llama", {"method": "dcr_dfg"}, PlanError, "The plan's distillation is None"),
        ("llama", {"method": "fitnets"}, PlanError, "The plan's distillation is None"),
        ("masked", {"method": "distillation"}, ConfigError, "Other tokens are hidden in every epoch"),
    ],
)
def test_a_cache_that_cannot_be_used_is_refused_before_anything_is_made(kind, given, error, said, base, texts, tmp_path):
    settings = Conversion(
        model=str(base(kind)),
        sites=ATTENTION[kind],
        student="LinearAttention",
        data=str(texts),
        steps=1,
        tokens=16,
        teacher_cache=8,
        **given,
    )
    with pytest.raises(error, match=said) as caught:
        in_python(settings, tmp_path / "out", lambda _: None)
    assert len(str(caught.value).splitlines()) == 3
    assert not (tmp_path / "out").exists()


def convert_as_rank(base: str, out: Path) -> str:
    sampling.AT_ONCE = 4
    return convert("llama", base, "self", out, **SMALL, method="distillation", teacher_cache=16)


@pytest.mark.processes
def test_two_processes_share_the_sampling_and_the_teacher(base, tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "AT_ONCE", 4)
    convert_as_rank(str(base("llama")), tmp_path / "one")
    results = Ranks({"convert": partial(convert_as_rank, str(base("llama")), tmp_path / "two")}, tmp_path)
    assert "teacher cache: 192 tokens" in results["convert"][0]
    work = tmp_path / "two" / "training"
    assert not (work / "teacher").exists()  # as the checkpoints, in the end
    for path in (tmp_path / "one" / "training" / "self").rglob("*.safetensors"):
        assert path.read_bytes() == (work / path.relative_to(tmp_path / "one" / "training")).read_bytes()
    a, b = (read(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.allclose(x, b[name], atol=2e-4) for name, x in a.items())


@pytest.mark.parametrize("given", [{"validation": "other"}, {"evaluate_on": ["other"]}])
def test_images_are_held_out_from_their_own_folder(given, base, sources, tmp_path):
    with pytest.raises(ConfigError, match="images cannot be held out from 'other'"):
        convert("vit", base("vit"), sources["vit"], tmp_path / "out", **given)


@pytest.mark.parametrize("kind", ["labels", "encoder", "masked"])
def test_other_kinds_have_validation_files_too(kind, base, texts, sources, tmp_path):
    source = sources.get(kind, texts)
    out = tmp_path / "out"
    convert(kind, base(kind), source, out, **SMALL, validation=source, evaluate_on=source)
    found = record(out)
    (further,) = found["evaluated_on"].values()
    for which in ("original", "converted"):
        assert further[which] == pytest.approx(found["quality"][which], rel=1e-5)


def test_a_file_too_small_to_evaluate_on_is_refused(base, texts, tmp_path):
    (tmp_path / "short.txt").write_text("one")
    with pytest.raises(segue.errors.DataError, match="short.txt is too small to evaluate on"):
        convert("llama", base("llama"), texts, tmp_path / "out", validation=tmp_path / "short.txt")
