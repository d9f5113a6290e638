"""`segue cost`: one plan phase by phase, several in one table."""

from __future__ import annotations

import json

import pytest
import torch

import segue
from segue.cli import cost as cost_table
from segue.errors import ConfigError, SegueError
from segue.lab import variants
from segue.lab.models import build, example
from segue.lab.small_vit import VisionTransformer
from tests.convert import gguf_files, small_models
from tests.helpers.command import call

pytestmark = pytest.mark.slow


def table_of(shown: str) -> dict[str, list[str]]:
    """Read a table back: its first column names its rows."""
    cells = [[cell.strip() for cell in line.strip("│ \n").split("│")] for line in shown.splitlines() if line.startswith("│")]
    return {name: rest for name, *rest in cells}


def test_cost_of_one_plan_phase_by_phase(tmp_path):
    shown = call("cost", "demo", "dcr", "--sites", "blocks.*.attn", "--steps", "50", "--picture", str(tmp_path / "cost.png"))
    rows = table_of(shown)
    assert list(rows) == ["blend", "after takeover", "complete run", "student-only", "full-teacher distillation"]
    assert [rows[name][0] for name in rows] == ["10", "40", "50", "50", "50"]
    model = VisionTransformer()
    by_hand = segue.cost(model, segue.methods.dcr(sites="blocks.*.attn"), torch.zeros(8, 1, 8, 8), total_steps=50)
    assert rows["complete run"][2:4] == [f"{by_hand.to_student_only:.3f}", f"{by_hand.to_distillation:.3f}"]
    assert all(sentence in shown for sentence in by_hand.notes)
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")


def test_cost_of_the_papers_seven_side_by_side():
    rows = table_of(call("cost", "demo", "paper", "--sites", "blocks.*.attn", "--steps", "20"))
    assert list(rows) == [variant.label for variant in variants.PAPER]
    against_full = {name: float(cells[2]) for name, cells in rows.items()}
    assert against_full["KL distillation"] == pytest.approx(1.0, abs=0.01)  # the first step compares the two sides
    assert against_full["Theseus"] < against_full["DCR"] < against_full["Theseus-Gumbel"] < 1.0


def test_cost_of_a_saved_plan_on_models_of_other_libraries(tmp_path):
    plan = segue.methods.lolcats(sites="encoder.layer.*.attention.self", hold=0.5)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
    sizes = {"num_hidden_layers": 2, "hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 8}
    config = {"model_type": "bert", "architectures": ["BertModel"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shown = call("cost", str(tmp_path), str(tmp_path / "plan.json"), "--steps", "10", "--tokens", "5", "--batch", "2")
    assert list(table_of(shown))[:2] == ["hold", "after takeover"]
    assert "blend" in table_of(
        call("cost", "timm:test_vit", "dcr", "--sites", "blocks.*.attn", "--steps", "10", "--batch", "1")
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}', '{"format": 1, "sites": 3, "nonsense": 4}'])
def test_a_file_that_is_no_plan(text, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(SegueError):
        call("cost", "demo", str(tmp_path / "plan.json"))


def test_a_large_model_is_counted_without_its_weights(monkeypatch):
    monkeypatch.setattr(cost_table, "LARGE", 1000)
    arguments = ("cost", "demo", "dcr", "--sites", "blocks.*.attn", "--steps", "20")
    large = call(*arguments)
    monkeypatch.setattr(cost_table, "LARGE", 10**9)
    assert table_of(large) == table_of(call(*arguments))


def test_a_model_that_zeros_do_not_suit_is_named(tmp_path):
    config = {"model_type": "t5", "num_layers": 1, "d_model": 8, "num_heads": 2, "d_kv": 4, "d_ff": 8, "vocab_size": 20}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="give it a batch of your own"):
        call("cost", str(tmp_path), "dcr", "--sites", "encoder.block.*.layer.0.SelfAttention", "--steps", "5")


def test_a_student_and_the_settings_of_a_method_are_given_as_to_convert():
    shown = call("cost", "demo", "lolcats(hold=0.4)", "--sites", "blocks.*.attn", "--steps", "10", "--student", "Performer")
    assert "demo to Performer, 8 examples a step" in shown
    model = build("demo", "cpu")
    plan = segue.methods.lolcats("blocks.*.attn", hold=0.4, student=segue.students.Performer())
    by_hand = segue.cost(model, plan, example(model, 8, 128), total_steps=10)
    assert table_of(shown)["complete run"] == by_hand.cells(by_hand.total)[1:]
    for wrong in (("lolcats(hold=7)", "Performer"), ("lolcat(hold=0.3)", "Performer"), ("dcr", "Perform")):
        with pytest.raises(SegueError):
            call("cost", "demo", wrong[0], "--sites", "blocks.*.attn", "--student", wrong[1])


@pytest.mark.parametrize("quantised", [False, True])
def test_cost_and_sites_read_what_convert_reads(quantised, tmp_path):
    original = small_models.model("llama")
    path = gguf_files.write(tmp_path / "small.gguf", original, quantised=quantised)
    pattern = "model.layers.*.self_attn"
    assert pattern in call("sites", str(path))
    shown = table_of(call("cost", str(path), "dcr", "--sites", pattern, "--steps", "10", "--tokens", "5", "--batch", "2"))
    ids = torch.zeros(2, 5, dtype=torch.long)
    by_hand = segue.cost(original, segue.methods.dcr(sites=pattern), {"input_ids": ids}, total_steps=10)
    assert shown["complete run"] == by_hand.cells(by_hand.total)[1:]
