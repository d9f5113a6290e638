"""Damaged and forged converted folders, beside a stand-in for `kernels`: refused, or read with the identical result."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from tests.convert.forged import forgeries, write_stand_in
from tests.torture.campaign import ACCEPTED, FOREIGN, HUNG, SILENT, Attempt, Bench, Outcome, is_three_lines, one_line
from tests.torture.checkpoint_files import SECONDS, digest
from tests.torture.mutations import damage, forge, forge_tensors
from tests.torture.watch import HungError, watched, within

IMPORTANT = [
    ["format"],
    ["segue", "plan"],
    ["segue", "plan", "student"],
    ["segue", "plan", "sites"],
    ["segue", "earlier"],
    ["base", "config"],
    ["base", "config", "architectures"],
    ["base", "config", "model_type"],
    ["base", "config", "dtype"],
    ["base", "config", "hidden_size"],
    ["base", "config", "num_attention_heads"],
    ["base", "config", "rms_norm_eps"],
    ["base", "config", "hidden_act"],
]


def stand_in(folder: Path) -> list[str]:
    """Install a package that records who calls it in the place of `kernels`, before transformers looks for it."""
    write_stand_in(folder)
    sys.path.insert(0, str(folder))
    import kernels

    return kernels.CALLS


def seal(folder: Path) -> None:
    """Write the hashes of what is there into the manifest, and its digest into the card: Segue's own refuses some files."""
    from segue.convert import manifest

    listed = json.loads((folder / manifest.FILE).read_text())
    listed["files"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in listed["files"]}
    content = json.dumps(listed).encode()
    (folder / manifest.FILE).write_bytes(content)
    line = manifest.line(hashlib.sha256(content).hexdigest()).removeprefix("- **Digest**: ")
    (folder / manifest.CARD).write_text(manifest.SHOWN.sub(line, (folder / manifest.CARD).read_text()))


def read(folder: Path) -> str:
    """Load the model, its tokenizer and its settings, and use them."""
    import torch

    from segue.convert.pretrained import open_base

    base = open_base(str(folder), download=False)
    words = base.processor("one two three", return_tensors="pt")["input_ids"]
    ids = torch.arange(20).reshape(2, 10) * 7 % 290 + 4
    with torch.no_grad():
        logits = base.model(ids).logits
        made = base.model.generate(ids, max_new_tokens=3, do_sample=False)
    return digest(logits, words, made)


def spoil(chance: random.Random, folder: Path) -> str:
    """Damage or forge a folder, and say how."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    kind = chance.choice(["damage", "damage", "record", "record", "file", "tensors", "code", "added"])
    if kind == "damage":
        return damage(chance, folder, names)
    if kind == "added":
        name = chance.choice(["model-00002.safetensors", "pytorch_model.bin", "modeling_mine.py", "adapter_config.json"])
        (folder / name).write_bytes((folder / "segue.json").read_bytes())
        return f"{name} added"
    record = json.loads((folder / "segue.json").read_text())
    if kind == "code":
        name = chance.choice(sorted(forgeries()))
        record["base"]["config"] |= forgeries(f"someone/kernels-{chance.randrange(10**9)}")[name]
        (folder / "segue.json").write_text(json.dumps(record))
        how = f"a configuration that would choose code: {name}"
    elif kind == "record":
        text, how = forge(chance, {name: record[name] for name in ("format", "segue", "base")}, IMPORTANT)
        rest = {name: value for name, value in record.items() if name not in ("format", "segue", "base")}
        (folder / "segue.json").write_text(f'{{"rest": {json.dumps(rest)}, {text[1:]}' if text != "{}" else text)
    elif kind == "tensors":
        content, how = forge_tensors(chance, (folder / "model.safetensors").read_bytes())
        (folder / "model.safetensors").write_bytes(content)
    else:
        name = chance.choice(
            ["config.json", "generation_config.json", "tokenizer_config.json"]
        )  # another tokenizer.json is one
        text, how = forge(chance, json.loads((folder / name).read_text()), [])
        (folder / name).write_text(text)
        how = f"{name}: {how}"
    seal(folder)
    return f"{kind} forged: {how}"


def attempt(source: Path, expected: str, place: Path, chance: random.Random, calls: list[str]) -> Outcome:
    """Spoil a copy of a folder, read it, and judge."""
    from segue.errors import SegueError

    folder = place / "converted"
    shutil.copytree(source, folder)
    case = spoil(chance, folder)
    calls.clear()
    found, error = "", None
    with watched(place) as seen:
        try:
            with within(SECONDS), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = read(folder)
        except HungError:
            return Outcome(case, HUNG, f"more than {SECONDS} s")
        except Exception as caught:
            error = caught
    if seen or calls or (folder / "executed").exists():
        return Outcome(case, ACCEPTED, f"it reached {[*seen, *calls][:3]}")
    if error is None:
        return Outcome(case) if found == expected else Outcome(case, ACCEPTED, "it is read, with another result")
    if not isinstance(error, SegueError):
        return Outcome(case, FOREIGN, one_line(error))
    return Outcome(case) if is_three_lines(error) else Outcome(case, SILENT, f"not three lines: {str(error)[:200]!r}")


def attempts(bench: Bench) -> Iterator[Attempt]:
    calls = stand_in(bench.kept / "site")
    from tests.convert import small_models

    source = bench.kept / "converted"
    if not source.exists():
        texts = bench.kept / "text.txt"
        texts.write_text(small_models.text())
        whole, base = bench.kept / "whole", small_models.save("llama", bench.kept / "base")
        small_models.convert("llama", base, texts, whole, student=small_models.STUDENT, steps=3, evaluations=1)
        shutil.copytree(whole, source, ignore=shutil.ignore_patterns("training", ".*"))
    expected = read(source)
    for chance in bench.chances():
        yield Attempt("a converted folder", lambda place, c=chance: attempt(source, expected, place, c, calls))
