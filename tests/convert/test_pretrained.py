"""segue.from_pretrained: the same model elsewhere, and nothing in a folder is ever run or believed."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import segue
from segue.convert.pretrained import open_base, outline
from segue.errors import CheckpointError, PlanError, SegueError
from segue.integrations.transformers import HandoverCallback
from tests.convert import gguf_files
from tests.convert.small_models import ATTENTION, convert, model, record, seal, text, tokenizer, types
from tests.helpers.processes import run_python
from tests.helpers.tiny import same_bits

IDS = torch.arange(40).reshape(2, 20) * 7 % 290 + 4


def logits(loaded, **given):
    with torch.no_grad():
        return loaded(IDS, **given).logits


def rewrite(folder, change):
    """Change the record of a folder, and its manifest with it."""
    found = record(folder)
    change(found)
    (folder / "segue.json").write_text(json.dumps(found))
    seal(folder)


@pytest.mark.processes
def test_a_fresh_process_with_only_torch_transformers_and_segue_gives_the_same_model(converted, base, place):
    """Bit for bit the model that was trained, and the same tokens with and without a cache."""
    found = run_python(Path(__file__).with_name("fresh.py"), converted, env={"HF_HUB_OFFLINE": "1"})
    said = json.loads(found.stdout)
    original = open_base(str(base("llama"))).model
    trained = segue.load_(original, place / "checkpoints").finalize_().eval()
    assert said["logits"] == logits(trained).flatten().view(torch.int32).tolist()
    assert said["tokens"][0] == said["tokens"][1]
    assert len(said["tokens"][0][0]) == 32
    assert (said["kind"], said["training"]) == ("LlamaForCausalLM", False)
    assert said["module"].startswith("transformers.")


def test_students_stand_in_the_model_and_teachers_are_gone(converted):
    loaded = segue.from_pretrained(converted)
    kinds = {type(layer.self_attn).__module__ for layer in loaded.model.layers}
    assert all(kind.startswith("segue.students") for kind in kinds)
    assert not [name for name, _ in loaded.named_modules() if "teacher" in name]
    assert loaded.segue == record(converted)["segue"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_type_is_asked_for(dtype, converted):
    loaded = segue.from_pretrained(converted, dtype=dtype)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    wanted = logits(segue.from_pretrained(converted))
    torch.testing.assert_close(logits(loaded).float(), wanted, rtol=0.1, atol=0.4 if dtype == torch.bfloat16 else 1e-4)


def test_nothing_is_drawn_from_the_global_generator(converted):
    torch.manual_seed(3)
    segue.from_pretrained(converted)
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(3))


def spoil_a_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def spoil_the_config(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))


def add_weights(folder):
    save_file({"model.norm.weight": torch.zeros(32)}, folder / "z.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (spoil_a_weight, "model.safetensors has changed"),
        (spoil_the_config, "config.json has changed"),
        (add_weights, "z.safetensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    ],
)
def test_what_is_not_as_it_was_written_is_refused(spoil, found, copied):
    spoil(copied)
    with pytest.raises(CheckpointError) as caught:
        segue.from_pretrained(copied)
    assert found in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3


def test_without_verifying_a_changed_weight_is_loaded(copied, converted):
    spoil_a_weight(copied)
    loaded = segue.from_pretrained(copied, verify=False)
    assert loaded.model.norm.weight[0] == segue.from_pretrained(converted).model.norm.weight[0] + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.update(format=99),
        lambda found: found.update(format=1),  # of version 0.1.0, which has no manifest
        lambda found: found.pop("base"),
        lambda found: found.pop("segue"),
        lambda found: found["segue"].pop("plan"),
        lambda found: found["base"]["config"].update(hidden_size=48),
        lambda found: found["base"]["config"].update(model_type="no_such_model"),
        lambda found: found["base"]["config"].update(dtype="save"),
        lambda found: found["base"]["config"].update(dtype="qint8"),
        lambda found: found["base"]["config"].update(head_dim=10**12),
        lambda found: found["base"]["config"].update(num_key_value_heads=-1),
        lambda found: found["base"]["config"].update(vocab_size=0),
        lambda found: found["segue"]["plan"].update(sites=["model.layers.7.self_attn"]),
    ],
)
def test_a_record_that_does_not_fit_is_refused_in_words(change, copied):
    rewrite(copied, change)
    for verify in (True, False):
        with pytest.raises(SegueError) as caught:
            segue.from_pretrained(copied, verify=verify)
        assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("content", ["", "[]", "{}", "3"])
def test_a_record_that_is_none_is_refused_in_words(content, copied):
    (copied / "segue.json").write_text(content)
    with pytest.raises(CheckpointError):
        segue.from_pretrained(copied)


def test_an_ordinary_model_is_sent_to_transformers(base, tmp_path):
    with pytest.raises(CheckpointError, match="load an ordinary model by transformers"):
        segue.from_pretrained(base("llama"))
    with pytest.raises(CheckpointError, match="give a folder that `segue convert` wrote"):
        segue.from_pretrained(tmp_path / "nowhere")


class Bomb:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_a_folder_full_of_code_runs_none_of_it(copied, converted, tmp_path, monkeypatch):
    """Modules, pickles and configurations that ask to be run: the model comes as if they were not there."""
    mark = tmp_path / "mark"
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py", "segue.py", "torch.py"):
        (copied / name).write_text(code + "class EvilModel: pass\nclass EvilConfig: pass\n")
    (copied / "custom_generate").mkdir()
    (copied / "custom_generate" / "generate.py").write_text(code)
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "adapter_model.bin"):
        (copied / name).write_bytes(pickle.dumps(Bomb(mark)))
    maps = {"AutoConfig": "configuration_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.EvilModel"}
    evil = {
        "auto_map": maps,
        "architectures": ["EvilModel", "LlamaForCausalLM"],
        "custom_pipelines": {"x": {"impl": "modeling_evil.E"}},
    }
    config = json.loads((copied / "config.json").read_text()) | evil
    (copied / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(copied)
    with pytest.raises(CheckpointError, match="__init__.py is not part of it"):
        segue.from_pretrained(copied)
    rewrite(copied, lambda found: found["base"]["config"].update(evil))
    loaded = segue.from_pretrained(copied)
    assert same_bits(logits(loaded), logits(segue.from_pretrained(converted)))
    assert not mark.exists()
    pickle.loads((copied / "pytorch_model.bin").read_bytes())  # it would have worked
    assert mark.exists()


@pytest.mark.parametrize("name", ["pipeline", "AutoModelForCausalLM", "LlamaConfig", "PreTrainedModel", "is_torch_available"])
def test_an_architecture_that_is_no_model_is_refused(name, copied):
    rewrite(copied, lambda found: found["base"]["config"].update(architectures=[name]))
    with pytest.raises(SegueError):
        segue.from_pretrained(copied)


@pytest.mark.parametrize(
    "kind", ["os.system", "students.AttentionSpec.__init__", "plan.Plan", "students.nn.Linear", "builtins.eval"]
)
def test_a_plan_can_name_nothing_but_segues_own_parts(kind, copied):
    rewrite(copied, lambda found: found["segue"]["plan"].update(student={"kind": kind}))
    with pytest.raises(PlanError, match="is not one of Segue's"):
        segue.from_pretrained(copied)


def mine(teacher: nn.Module, site: segue.Site) -> nn.Module:
    return segue.students.LinearAttention()(teacher, site)


def trained_by_trainer(folder: Path, student, kind: str = "llama") -> nn.Module:
    """Convert a model in the stock Trainer and save it as Trainer does."""
    reader, chosen = tokenizer(), text(300).split(".\n")
    trained = model(kind)
    ids = [reader(line, padding="max_length", truncation=True, max_length=12)["input_ids"] for line in chosen[:16]]
    rows = [{"input_ids": line, "labels": line} for line in ids]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "work"), max_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    plan = segue.methods.dcr(sites=ATTENTION[kind], student=student)
    trainer = transformers.Trainer(trained, arguments, train_dataset=rows, callbacks=[HandoverCallback(plan)])
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    return trained.eval()


def test_a_folder_of_the_trainer_callback_comes_back(tmp_path):
    trained = trained_by_trainer(tmp_path, segue.students.LinearAttention(), "gpt2")
    assert same_bits(logits(segue.from_pretrained(tmp_path / "saved")), logits(trained))


def test_a_student_of_ones_own_is_given_again(tmp_path):
    trained = trained_by_trainer(tmp_path, mine)
    with pytest.raises(PlanError, match="It is your own 'mine'"):
        segue.from_pretrained(tmp_path / "saved")
    assert same_bits(logits(segue.from_pretrained(tmp_path / "saved", student=mine)), logits(trained))


def test_the_trainers_folder_is_a_base_with_its_students(tmp_path):
    """Not one whose students are random because nobody rebuilt them."""
    trained = trained_by_trainer(tmp_path, segue.students.LinearAttention())
    tokenizer().save_pretrained(tmp_path / "saved")
    assert same_bits(logits(open_base(str(tmp_path / "saved")).model), logits(trained))


def test_a_converted_model_is_converted_again_and_reloads(converted, texts, tmp_path):
    out = tmp_path / "twice"
    convert("llama", converted, texts, out, sites="model.layers.*.mlp", student="NarrowMlp(ratio=0.5)", steps=2, evaluations=1)
    loaded, before = segue.from_pretrained(out), segue.from_pretrained(converted)
    assert all(type(layer.self_attn).__module__.startswith("segue") for layer in loaded.model.layers)
    assert sum(p.numel() for p in loaded.parameters()) < sum(p.numel() for p in before.parameters())
    for name, value in before.state_dict().items():
        if ".mlp." not in name:
            assert same_bits(loaded.state_dict()[name], value), name
    assert record(out)["segue"]["earlier"] == record(converted)["segue"]


def without_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


def without_a_length(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": "x"}))


def pickled(folder):
    (folder / "model.safetensors").unlink()
    torch.save(model("llama").state_dict(), folder / "pytorch_model.bin")


def cut_short(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def a_weight_less(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_code(folder):
    (folder / "configuration_evil.py").write_text(f"open({str(folder / 'mark')!r}, 'w').close()\nclass EvilConfig: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.EvilConfig"}}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (without_tokenizer, "tokenizer"),
        (without_a_length, "ValueError: model_max_length in tokenizer_config.json is 'x', not a number"),
        (pickled, "no file named model.safetensors"),
        (cut_short, "SafetensorError"),
        (a_weight_less, "lack 1 weights (model.layers.1.mlp.up_proj.weight first)"),
        (with_code, "ValueError"),
        (lambda folder: (folder / "config.json").write_text("{}"), "model_type"),
        (shutil.rmtree, "nowhere to be found"),
    ],
)
def test_a_base_that_is_not_complete_is_refused(spoil, found, base, texts, tmp_path, monkeypatch):
    shutil.copytree(base("llama"), tmp_path / "base")
    spoil(tmp_path / "base")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)  # nobody may be asked whether to trust code
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(SegueError) as caught:
        convert("llama", tmp_path / "base", texts, tmp_path / "out")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert str(tmp_path / "base") in lines[0]
    if spoil is not shutil.rmtree:
        assert found in lines[1]
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "base" / "mark").exists()


@pytest.mark.parametrize("quantised", [False, True])
def test_gguf(quantised, texts, tmp_path):
    """With the tokenizer inside the file, or next to it."""
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
    convert("llama", path, texts, tmp_path / "out", steps=2, evaluations=1)
    loaded = segue.from_pretrained(tmp_path / "out")
    assert same_bits(loaded.lm_head.weight, opened.model.lm_head.weight)
    assert types(tmp_path / "out" / "model.safetensors") == {"F32"}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert reader.decode(reader("one two three", add_special_tokens=False)["input_ids"]) == "one two three"


@pytest.mark.parametrize("kind", ["llama", "gpt2", "masked", "labels", "encoder", "vit"])
def test_an_outline_has_the_names_and_shapes_that_are_loaded(kind, base):
    loaded = open_base(str(base(kind))).model
    for name in (str(base(kind)), f"hf:{base(kind)}"):
        found = outline(name)
        assert {key: value.shape for key, value in found.state_dict().items()} == {
            key: value.shape for key, value in loaded.state_dict().items()
        }
        assert {type(module) for module in found.modules()} == {type(module) for module in loaded.modules()}
        assert {parameter.device.type for parameter in found.parameters()} == {"meta"}


def test_an_outline_of_a_gguf_file_and_of_a_converted_folder(converted, tmp_path):
    path = gguf_files.write(tmp_path / "small.gguf", model("llama"), tokenizer())
    assert outline(str(path)).state_dict().keys() == open_base(str(path)).model.state_dict().keys()
    assert outline(str(converted)).state_dict().keys() == segue.from_pretrained(converted).state_dict().keys()
