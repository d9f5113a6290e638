"""`segue convert`: every family of models and every method; interrupted conversions resume, wrong settings are refused."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import segue
from segue.checkpoint import folders
from segue.cli import main
from segue.convert.convert import Conversion
from segue.convert.convert import convert as in_python
from segue.convert.tasks import NextToken
from segue.core.tensor_files import read
from segue.errors import CheckpointError, ConfigError, SegueError
from segue.reporting.records import read_begun
from segue.training.progress import Progress
from tests.convert.small_models import (
    ATTENTION,
    CLASSES,
    FILES,
    POSITIONS,
    STUDENT,
    assert_same_conversion,
    convert,
    model,
    options,
    points,
    quality,
    record,
    tokenizer,
    types,
)
from tests.helpers.command import call
from tests.helpers.processes import Ranks
from tests.helpers.tiny import same_bits

pytestmark = pytest.mark.slow

METHODS = dict.fromkeys(segue.methods.ALL, "LinearAttention") | {  # those of today with another student each
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


NAMES = {"masked": "perplexity", "labels": "accuracy", "encoder": "cosine", "vit": "accuracy"}


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "mistral", "masked", "labels", "encoder", "vit"])
def test_every_family_converts_and_reloads(kind, family):
    out, said = family(kind)
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


@pytest.mark.parametrize("method", METHODS)
def test_every_method_converts(method, base, texts, tmp_path):
    out, student = tmp_path / "out", METHODS[method]
    sites = "model.layers.*.mlp" if "Mlp" in student else ATTENTION["llama"]
    convert("llama", base("llama"), texts, out, method=method, student=student, sites=sites, steps=3, evaluations=1)
    loaded, original = segue.from_pretrained(out), model("llama")
    smaller = sum(p.numel() for p in loaded.parameters()) < sum(p.numel() for p in original.parameters())
    assert smaller == (student.startswith(("NarrowMlp", "LowRankMlp")))
    ids = torch.arange(24).reshape(2, 12) * 5 % 290 + 4
    with torch.no_grad():
        given, uncached = (loaded.generate(ids, max_new_tokens=6, do_sample=False, use_cache=use) for use in (True, False))
    assert torch.equal(given, uncached)


def test_excluded_layers_stay_as_they_were(base, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(texts.parent)
    convert("llama", base("llama").name, texts.name, tmp_path / "out", exclude="model.layers.{0,29}.*", steps=2, evaluations=1)
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
    convert(
        "llama", base("llama"), texts, out, sites="Span('model.layers', every=2)", student="OneLayer", steps=2, evaluations=1
    )
    loaded = segue.from_pretrained(out)
    assert loaded.config.num_hidden_layers == len(loaded.model.layers) == 1
    assert json.loads((out / "config.json").read_text())["base_config"]["num_hidden_layers"] == 2


def test_mixed_precision_accumulation_and_training_all(base, texts, tmp_path):
    out = tmp_path / "out"
    given = {"precision": "bf16", "accumulate": 2, "train": "all", "dtype": "bfloat16", "lr": 0.1}
    method = "transfer(hold=0.5, slower=1.0, warmup=0.0)"
    convert("llama", base("llama"), texts, out, method=method, steps=2, evaluations=1, **given)
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
    convert("llama", tmp_path / "base", texts, tmp_path / "once", steps=2, evaluations=1)
    convert("llama", tmp_path / "once", texts, tmp_path / "twice", steps=2, evaluations=1, student="Performer")
    for name in ("once", "twice"):
        assert types(tmp_path / name / "model.safetensors") == {"BF16"}, name
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "bfloat16", name
        loaded = segue.from_pretrained(tmp_path / name)
        assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
        assert same_bits(loaded.lm_head.weight, original.lm_head.weight)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"student": "WindowLinear"}, "Nearest names: WindowedLinear"),
        ({"student": "WindowedLinear(window=-1)"}, r"WindowedLinear(window=...) must be a positive integer"),
        ({"method": "dcr_dgf"}, "Nearest names: dcr_dfg"),
        ({"sites": "model.layers.*.self_atn"}, "Nearest names: model.layers.0.self_attn"),
        ({"exclude": "model.norm"}, "matches none of the 2 sites"),
        ({"exclude": "model.layers.*.self_attn"}, "nothing is left to replace"),
        ({"data": "nowhere.txt"}, "It is neither a file nor a downloaded dataset"),
        ({"tokens": POSITIONS + 1}, f"tokens must be at most {POSITIONS}"),
        ({"lr": 0}, "positive"),
        ({"validation": 1.5}, "validation must be between 0 and 1, got 1.5."),
        ({"validation": 0}, "validation must be between 0 and 1, got 0."),
    ],
)
def test_a_wrong_word_is_refused_before_anything_is_written(given, found, base, texts, tmp_path):
    with pytest.raises(SegueError) as caught:
        convert("llama", base("llama"), given.pop("data", texts), tmp_path / "out", **given)
    assert len(str(caught.value).splitlines()) == 3
    assert found in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_file_in_place_of_the_folder_is_left_alone(base, texts, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(SegueError, match="is not a folder"):
        convert("llama", base("llama"), texts, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_the_command_says_it_in_three_lines_and_leaves_by_1(base, texts, tmp_path, monkeypatch, capsys):
    arguments = options("llama", texts, tmp_path / "out", method="dcr_dgf")
    monkeypatch.setattr(sys, "argv", ["segue", "convert", str(base("llama")), *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    said = capsys.readouterr()
    assert len(said.err.strip().splitlines()) == 3
    assert said.err.startswith("ConfigError: ")
    assert "Traceback" not in said.err + said.out


def stop(monkeypatch, how, step):
    """Send a signal from within the loss of a step, or from what takes its place where distillation alone counts."""
    left = iter(range(step, -1, -1))

    def deadly(plain, self, model, batch):
        if next(left, 1) == 0:
            os.kill(os.getpid(), how)
        return plain(self, model, batch)

    for name in ("__call__", "forward_only"):
        plain = getattr(NextToken, name)
        monkeypatch.setattr(NextToken, name, lambda self, model, batch, plain=plain: deadly(plain, self, model, batch))


def again(base, texts, out, **given):
    return convert("llama", base("llama"), texts, out, **{"student": STUDENT, "steps": 6, **given})


@pytest.mark.parametrize(("how", "left"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_stopped_conversion_resumes_bit_for_bit(how, left, base, texts, converted, tmp_path, monkeypatch):
    out = tmp_path / "out"
    settings = json.loads((converted / "training" / "settings.json").read_text())
    with monkeypatch.context() as patched, pytest.raises(left):
        stop(patched, how, 3)
        in_python(Conversion.from_dict(settings), out, lambda text: None)
    assert {path.name for path in out.iterdir()} == {"training"}
    begun = read_begun(out / "training" / "begun.json")  # for a report that follows it
    assert (begun.train_info.score, begun.train_info.total_steps) == ("perplexity", 6)
    assert math.log(begun.train_info.teacher["perplexity"]) == pytest.approx(record(converted)["quality"]["original"]["loss"])
    assert list(begun.train_info.points[0].cosine) == begun.train_info.sites
    with pytest.raises(ConfigError) as caught:
        again(base, texts, out, lr=1e-3)
    assert "It has lr None." in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3
    if how == signal.SIGTERM:
        said = again(base, texts, out)
    else:  # the latest is damaged: the hint has the command that takes the earlier one
        newest, _ = folders.checkpoints(out / "training" / "checkpoints")
        (newest / "tensors.safetensors").unlink()
        with pytest.raises(CheckpointError) as damaged:
            call("resume", out)
        hint = str(damaged.value)
        said = call(*shlex.split(hint[hint.index("segue resume") :])[1:])
    assert "step 0" not in said
    assert_same_conversion(out, converted)


def test_a_finished_folder_is_left_alone(base, texts, converted):
    before = {path.name: path.stat().st_mtime_ns for path in converted.iterdir()}
    with pytest.raises(ConfigError, match="It holds a finished conversion"):
        again(base, texts, converted)
    assert "is finished: there is nothing to resume" in call("resume", converted)
    assert {path.name: path.stat().st_mtime_ns for path in converted.iterdir()} == before


def test_what_failed_at_its_start_can_be_repeated(base, texts, tmp_path):
    out = tmp_path / "out"
    for wrong in ({"student": "Fourier"}, {"sites": "model.layers.*.mlp"}, {"student": "WindowedLinear(window=-3)"}):
        with pytest.raises(SegueError):
            again(base, texts, out, **wrong)
        assert not (out / "segue.json").exists()
    again(base, texts, out, student="LinearAttention", steps=1, evaluations=1)
    assert segue.from_pretrained(out)


def test_a_conversion_needs_model_sites_student_data_and_out_alone(base, texts, tmp_path, monkeypatch):
    """The default length is announced with its time, evaluations cost a tenth, and no checkpoint stays."""
    monkeypatch.setattr("segue.convert.recipes.STEPS", 12)
    out = tmp_path / "out"
    given = {"steps": None, "batch": None, "tokens": 16, "evaluations": None}
    said = convert("llama", base("llama"), texts, out, student=STUDENT, **given)
    announced = re.search(
        r"^12 steps, about .+ \(9 transfer at .+, 3 students alone at .+\); (\d+) evaluations on \d of 2", said, re.M
    )
    assert announced
    assert len(re.findall(r"^step \d", said, re.M)) == int(announced.group(1))
    assert sorted(path.name for path in (out / "training").iterdir() if path.name != ".lock") == [
        "begun.json",
        "metrics.jsonl",
        "settings.json",
    ]
    found = record(out)["conversion"]
    assert (found["method"], found["steps"]) == ("transfer", 12)
    assert record(out)["segue"]["plan"]["distill"]["temperature"] == 1.0


def test_a_rehearsal_changes_nothing(base, texts, tmp_path):
    """With the number of evaluations left open, what is learned is what it is without a rehearsal."""
    common = {"student": STUDENT, "steps": 5, "method": "transfer(first='new', hold=0.4)"}
    convert("llama", base("llama"), texts, tmp_path / "timed", **common, evaluations=None)
    convert("llama", base("llama"), texts, tmp_path / "plain", **common, evaluations=1)
    timed, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("timed", "plain"))
    assert all(same_bits(timed[name], plain[name]) for name in plain)


def test_a_resumed_conversion_knows_what_is_left(base, texts, tmp_path, monkeypatch):
    """The steps of the two phases are not equally long: what was rehearsed at the start counts after a resume too."""
    given = {"student": STUDENT, "steps": 8, "evaluations": None, "method": "transfer(hold=0.5)"}
    with monkeypatch.context() as patched, pytest.raises(AssertionError, match="stopped at step"):
        stop(patched, signal.SIGTERM, 4 + 2)  # the first four steps are the rehearsal's
        convert("llama", base("llama"), texts, tmp_path, **given)
    kept = json.loads((tmp_path / "training" / "rehearsed.json").read_text())
    assert {name: steps for name, (steps, _) in kept.items()} == {"transfer": 4, "students alone": 4}
    seen, plain = [], Progress.__init__

    def watched(self, name, total, *, costs=None, **others):
        seen.append((name, costs))
        plain(self, name, total, costs=costs, **others)

    monkeypatch.setattr(Progress, "__init__", watched)
    said = call("resume", tmp_path)
    assert re.search(r"^resuming after step 3 of 8, about [\d.]+ \w+ left$", said, re.M)
    assert ("converting", [each for steps, each in kept.values() for _ in range(steps)]) in seen
    assert not (tmp_path / "training" / "rehearsed.json").exists()


def test_a_rehearsal_that_is_interrupted_names_the_command_alone(base, texts, tmp_path, monkeypatch, capfd):
    stop(monkeypatch, signal.SIGINT, 0)
    said: list[str] = []
    needed = {"model": str(base("llama")), "sites": ATTENTION["llama"], "student": STUDENT, "data": str(texts)}
    with pytest.raises(KeyboardInterrupt):
        in_python(Conversion(**needed, steps=6, batch=4, tokens=16), tmp_path / "out", said.append)
    assert said[-1].startswith("To resume, repeat the command, or: segue resume ")
    assert "fit has no folder" not in capfd.readouterr().err


def test_a_dry_run_says_what_a_conversion_takes_and_leaves_nothing(base, texts, tmp_path, monkeypatch):
    (tmp_path / "drafts").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "drafts"))
    before = {path: path.stat().st_mtime_ns for path in base("llama").iterdir()}
    said = convert("llama", base("llama"), texts, tmp_path / "out", student=STUDENT, steps=50, evaluations=None, dry_run=True)
    patterns = (r"50 steps, about ", r"operations: [\d.]+ MFLOPs", r"memory: [\d.]+ [MG]iB", r"disk: [\d.]+ KiB of checkpoints")
    assert all(re.search(pattern, said) for pattern in patterns)
    assert "Nothing was written." in said
    assert "segue eval" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["drafts"]
    assert not list((tmp_path / "drafts").iterdir())
    assert {path: path.stat().st_mtime_ns for path in base("llama").iterdir()} == before


@pytest.mark.parametrize("method", ["dcr_dfg", None])
def test_a_control_converts_nothing_and_says_so(method, base, texts, tmp_path):
    out = tmp_path / "out"
    said = convert("llama", base("llama"), texts, out, student=STUDENT, control=True, method=method, evaluations=1, lr=1e-3)
    start, end = points(out)
    assert start["students"]["loss"] == pytest.approx(start["blend"]["loss"], rel=1e-5)  # exact before training
    assert end["students"]["loss"] < start["students"]["loss"] - 1e-3  # it adapts to the data
    assert "control: exact softmax students" in said
    assert record(out)["conversion"] | {"control": True, "student": repr(segue.students.Softmax())} == record(out)["conversion"]
    card = (out / "README.md").read_text()
    assert "**A control**" in card
    assert ("by the loss of the task: those of `transfer` compare" in card) == (method is None)
    assert type(segue.from_pretrained(out).model.layers[0].self_attn.mixer).__name__ == "SoftmaxMixer"


LORA = {"student": STUDENT, "steps": 6, "lora": 2, "evaluations": 1, "method": "transfer(first='new')", "lr_backbone": 0.05}


def test_lora_around_the_sites_resumes_bit_for_bit_and_is_merged(base, texts, tmp_path, monkeypatch):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    said = convert("llama", base("llama"), texts, whole, **LORA)
    count = sum(weight.numel() for weight in load_file(base("llama") / "model.safetensors").values())
    assert f"LlamaForCausalLM, {count:,} parameters" in said  # of the original, without adapters
    with monkeypatch.context() as patched, pytest.raises(AssertionError, match="stopped at step"):  # it leaves by 143
        stop(patched, signal.SIGTERM, 4)
        convert("llama", base("llama"), texts, stopped, **LORA)
    call("resume", stopped)
    assert_same_conversion(stopped, whole)
    before, after = load_file(base("llama") / "model.safetensors"), load_file(whole / "model.safetensors")
    around = [name for name in before if "self_attn" not in name]
    assert not [name for name in after if "lora" in name]
    assert all(same_bits(before[name], after[name]) != (".mlp." in name) for name in around)  # norms, embeddings, head stay
    loaded = segue.from_pretrained(whole)
    assert type(loaded.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert points(whole)[-1]["students"] == pytest.approx(record(whole)["quality"]["converted"], rel=1e-4)


def test_a_saved_plan_is_converted_by(base, texts, tmp_path):
    plan = segue.methods.lolcats(
        sites=ATTENTION["llama"], student=segue.students.WindowedLinear(window=4), hold=0.25, seed=3, train="all"
    )
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
    out = tmp_path / "out"
    convert("llama", base("llama"), texts, out, plan=tmp_path / "plan.json", sites=None, student=None, evaluations=1)
    saved = record(out)
    assert saved["segue"]["plan"] | {"sites": None} == plan.to_dict() | {"sites": None}
    assert saved["conversion"]["student"] == repr(plan.student)
    assert saved["conversion"]["sites"] == ATTENTION["llama"]
    card = (out / "README.md").read_text()
    assert "the plan `plan.json`" in card
    assert segue.from_pretrained(out)


@pytest.mark.parametrize("interrupted_at", [1, 4])
def test_a_transfer_resumes_bit_for_bit_in_both_phases(interrupted_at, base, texts, tmp_path, monkeypatch):
    given = {"student": STUDENT, "steps": 6, "evaluations": 2, "method": "transfer(first='new', hold=0.5)", "accumulate": 2}
    convert("llama", base("llama"), texts, tmp_path / "whole", **given)
    with monkeypatch.context() as patched, pytest.raises(AssertionError, match="stopped at step"):
        stop(patched, signal.SIGTERM, 2 * interrupted_at)
        convert("llama", base("llama"), texts, tmp_path / "stopped", **given)
    convert("llama", base("llama"), texts, tmp_path / "stopped", **given)
    assert_same_conversion(tmp_path / "stopped", tmp_path / "whole")


def test_a_conversion_keeps_the_phases_that_it_began_with(base, texts, tmp_path, monkeypatch):
    """Between two versions the defaults of a method may change; half a run of each would be neither."""
    given = {"student": STUDENT, "steps": 6, "evaluations": 1}
    convert("llama", base("llama"), texts, tmp_path / "whole", **given)
    with monkeypatch.context() as patched, pytest.raises(AssertionError, match="stopped at step"):
        stop(patched, signal.SIGTERM, 3)
        convert("llama", base("llama"), texts, tmp_path / "stopped", **given)
    monkeypatch.setitem(segue.methods.ALL, "transfer", partial(segue.methods.transfer, hold=0.2, split=2))
    convert("llama", base("llama"), texts, tmp_path / "stopped", **given)
    assert_same_conversion(tmp_path / "stopped", tmp_path / "whole")


SPLIT = {"ddp": "transfer(hold=0.3, split=3)", "fsdp2": "transfer(hold=0.3, split=1)"}  # shards allow one update for a batch


def convert_as_rank(engine: str, base: str, texts: str, place: Path) -> dict[str, Any]:
    """Convert as one of two processes that `accelerate launch` or torchrun has started."""
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_VERSION": "2"}
    os.environ |= fsdp if engine == "fsdp2" else {}  # transformers then loads weights in one process only
    seen = []
    plain = {name: getattr(NextToken, name) for name in ("__call__", "forward_only")}  # by KL alone there is no loss

    def watched(name, self, model, batch):
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())  # not the root's, if just evaluated
        seen.append([type(model).__name__, len(batch["input_ids"]), sharded])
        return plain[name](self, model, batch)

    for name in plain:
        setattr(NextToken, name, lambda self, model, batch, name=name: watched(name, self, model, batch))
    try:
        said = convert("llama", base, texts, place / engine, student=STUDENT, steps=6, evaluations=None, method=SPLIT[engine])
    finally:
        for name, method in plain.items():
            setattr(NextToken, name, method)
    return {"said": said, "seen": seen, "world": torch.distributed.get_world_size()}


@pytest.fixture(scope="module")
def by_one_process(base, texts, tmp_path_factory):
    """Return what one process makes of it, for each engine."""
    place = tmp_path_factory.mktemp("one")
    for engine, method in SPLIT.items():
        convert("llama", base("llama"), texts, place / engine, student=STUDENT, steps=6, method=method)
    return place


@pytest.fixture(scope="module")
def ranks(base, texts, tmp_path_factory):
    place = tmp_path_factory.mktemp("ranks")
    arguments = (str(base("llama")), str(texts), place)
    return place, Ranks({engine: partial(convert_as_rank, engine, *arguments) for engine in ("ddp", "fsdp2")}, place)


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_processes_convert_as_one_does(engine, ranks, by_one_process):
    place, results = ranks
    first, second = results[engine]
    out, alone = place / engine, by_one_process / engine
    assert {path.name for path in out.iterdir()} == {path.name for path in alone.iterdir()}
    found, wanted = read(out / "model.safetensors"), read(alone / "model.safetensors")
    assert set(found) == set(wanted)
    for name, weight in wanted.items():
        assert found[name].shape == weight.shape
        assert (found[name] - weight).abs().max() <= 1e-4 * weight.abs().max() + 1e-6, name
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert segue.from_pretrained(out)
    network = "DistributedDataParallel" if engine == "ddp" else "FSDPLlamaForCausalLM"
    for found in (first, second):
        assert found["world"] == 2
        local = [["LlamaForCausalLM", 2, False]] * 2 if engine == "ddp" else []  # whose gradients do not pass DDP
        expected = [*local, *[[network, 2, engine == "fsdp2"]] * (6 - len(local))]  # half of each batch of four
        rehearsed = [*local, *[[network, 2, False]] * 2] if engine == "ddp" else []  # two steps of each phase
        assert found["seen"] == rehearsed + expected
    announced = re.search(r"^6 steps, about .*; (\d+) evaluations on", first["said"], re.M)
    assert (announced is None) == (engine == "fsdp2") == ("no time is announced: " in first["said"])
    evaluations = 7 if announced is None else int(announced[1])  # as many as there are steps, and one before them
    assert len(re.findall(r"^step \d", first["said"], re.M)) == evaluations
    assert "as saved" in first["said"]
    assert second["said"] == ""
