"""Which students leave PyTorch: finalized models of each, by torch.export and to ONNX.

    .venv/bin/python -m tests.matrix.export    a few minutes; writes export.json, and the part of docs/models.md on it

Every student of the matrix, and mixed heads, in a causal model and in one that sees all tokens. What was exported must compute
what the model computes: the program of torch.export in torch, that of ONNX by ONNX's own reference implementation.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import segue
from tests.helpers.processes import ROOT
from tests.matrix.cells import ABSENT, OPERATORS, REFUSED, STUDENTS, WORKS, Student, sites_of
from tests.matrix.entries import Batch, Entry, all_entries
from tests.matrix.proofs import CLOSE, SAME, call, difference, first_tensor

KEPT = Path(__file__).with_name("export.json")
MODELS = {"all tokens": "timm vit", "causal": "transformers llama"}
MIXED = segue.students.MixedHeads(operator=segue.students.LinearAttention(), keep=(0,))
TRIED = [*STUDENTS, Student("MixedHeads", "attention", lambda _: MIXED)]
UNTRANSLATED = re.compile(r"torch\.ops\.(aten\.\w+)")
PACKAGES = ("torch", "onnx", "onnxscript")


def cell(entry: Entry, student: Student) -> dict[str, str]:
    """Return what became of torch.export and of ONNX: that it works, or why not."""
    if sites_of(entry, student.place) is None:
        return {"export": ABSENT, "onnx": ABSENT}
    try:
        model = finished(entry, student)
    except segue.errors.SegueError:
        return {"export": REFUSED, "onnx": REFUSED}
    batch = unpadded(entry.batch())
    with torch.no_grad():
        wanted = call(model, batch)
        try:
            program = torch.export.export(model, batch.args, batch.kwargs)
        except Exception as error:  # whatever the tracer cannot follow
            return {"export": f"{type(error).__name__}: {str(error).splitlines()[0]}", "onnx": "not exported"}
        off = difference(first_tensor(program.module()(*batch.args, **batch.kwargs)), wanted)
        return {"export": WORKS if off <= SAME else f"off by {off:.2g}", "onnx": onnx(program, batch, wanted)}


def finished(entry: Entry, student: Student) -> nn.Module:
    """Return a model whose students have taken over."""
    model = entry.model(2 if student.place == "span" else 1)
    sites = sites_of(entry, student.place)
    teachers = [model.get_submodule(site.name) for site in segue.select(model, sites)]
    plan = segue.Plan(sites=sites, student=student.make(teachers), **student.settings)
    batch = entry.batch()
    example = batch.kwargs or batch.args
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of spans, on save_pretrained
        segue.replace_(model, plan, total_steps=1, example=example).finalize_(force=True)
    if hasattr(model, "config"):
        model.config.use_cache = False
    return model.eval()


def unpadded(batch: Batch) -> Batch:
    """Leave out the mask: a model is exported for sequences of one length."""
    return Batch(batch.args, {name: value for name, value in batch.kwargs.items() if name != "attention_mask"})


def onnx(program: torch.export.ExportedProgram, batch: Batch, wanted: torch.Tensor) -> str:
    """Translate to ONNX, run that, and say what became of it."""
    from onnx.reference import ReferenceEvaluator

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter itself
            made = torch.onnx.export(program, verbose=False)
    except torch.onnx.errors.OnnxExporterError as error:
        return f"ONNX has no `{UNTRANSLATED.findall(str(error))[-1]}`"
    reference = ReferenceEvaluator(made.model_proto)
    given = [*batch.args, *batch.kwargs.values()]
    values = {name: value.numpy() for name, value in zip(reference.input_names, given, strict=True)}
    off = difference(torch.from_numpy(reference.run(None, values)[0]), wanted)
    return WORKS if off <= CLOSE else f"off by {off:.2g}"


def kept() -> dict[str, Any]:
    return dict(json.loads(KEPT.read_text(encoding="utf-8")))


def main() -> int:
    """Try every student, keep what was found, and write the page again."""
    from tests.matrix import page, record

    found: dict[str, dict[str, dict[str, str]]] = {}
    for student in sorted(TRIED, key=lambda student: [*OPERATORS, "MixedHeads", student.name].index(student.name)):
        found[student.name] = {kind: cell(all_entries()[name], student) for kind, name in MODELS.items()}
        print(student.name, found[student.name], flush=True)
    versions = {package: version(package).partition("+")[0] for package in PACKAGES}
    KEPT.write_text(json.dumps({"versions": versions, "students": found}, indent=1) + "\n", encoding="utf-8")
    page.write(ROOT / "docs" / "models.md", *record.kept())
    return int(any("off by" in text for kinds in found.values() for cells in kinds.values() for text in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
