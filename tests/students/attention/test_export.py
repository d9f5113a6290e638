"""A finalized model leaves PyTorch: torch.export for every operator, ONNX as the table in docs/operators.md says."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import segue
from segue.students.attention.module import Operator

PAGE = Path(__file__).parents[3] / "docs" / "operators.md"
SETTINGS = {"MixedHeads": {"operator": segue.students.LinearAttention(), "keep": (0,)}, "Linformer": {"tokens": 5}}
WIDE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def operators() -> list[str]:
    found = {name: getattr(segue.students, name) for name in segue.students.names()}
    return [name for name, made in found.items() if isinstance(made, type) and issubclass(made, Operator)]


def table() -> dict[str, list[str]]:
    """Return the cells of the page by operator: torch.export, ONNX, ONNX of a causal model, the reason."""
    part = PAGE.read_text(encoding="utf-8").partition("## Export")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows}


def finished(name: str, *, causal: bool) -> tuple[nn.Module, torch.Tensor]:
    """Return a finalized model of one layer, and its input."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if causal:
            config = transformers.LlamaConfig(**WIDE, vocab_size=50, use_cache=False)
            model, sites = transformers.LlamaForCausalLM(config), "model.layers.*.self_attn"
            inputs = torch.randint(50, (2, 6))
        else:
            model = transformers.ViTForImageClassification(
                transformers.ViTConfig(**WIDE, image_size=8, patch_size=4, num_labels=3)
            )
            inputs = torch.randn(2, 3, 8, 8)
            sites = next(name for name, module in model.named_modules() if type(module).__name__ == "ViTAttention")
        student = getattr(segue.students, name)(**SETTINGS.get(name, {}))
        handover = segue.replace_(model.eval(), segue.Plan(sites=sites, student=student), total_steps=1)
        return handover.finalize_(force=True), inputs


def to_onnx(exported: torch.export.ExportedProgram, inputs: torch.Tensor) -> torch.Tensor | str:
    """Translate to ONNX and run that by ONNX's reference; return the output, or the operation without a translation."""
    from onnx.reference import ReferenceEvaluator

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter itself
            program = torch.onnx.export(exported, verbose=False)
    except torch.onnx.errors.OnnxExporterError as error:
        return re.findall(r"torch\.ops\.(aten\.\w+)", str(error))[-1]
    reference = ReferenceEvaluator(program.model_proto)
    return torch.from_numpy(reference.run(None, {reference.input_names[0]: inputs.numpy()})[0])


def test_the_table_lists_every_operator():
    assert list(table()) == sorted(operators())


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["complete", "causal"])
@pytest.mark.parametrize("name", operators())
def test_a_finalized_model_is_exported_as_the_table_says(name, causal):
    exports, *onnx, reason = table()[name]
    if causal and not getattr(segue.students, name).mixer_class.supports_causal:
        assert onnx[1] == "-"
        return
    model, inputs = finished(name, causal=causal)
    wanted = model(inputs).logits
    exported = torch.export.export(model, (inputs,))
    torch.testing.assert_close(exported.module()(inputs).logits, wanted)
    assert exports == "yes"
    if not causal and onnx[0] == onnx[1]:
        return  # the causal model decides
    found = to_onnx(exported, inputs)
    if onnx[causal] == "yes":
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    else:
        assert onnx[causal] == "no"
        assert f"`{found}`" in reason
