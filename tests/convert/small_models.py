"""Tiny pretrained models in folders, texts to convert them with, and the command, called in this process."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import segue
from segue.convert import manifest
from segue.convert.data import Data, load
from segue.convert.options import Conversion
from segue.convert.pretrained import Base, open_base
from segue.training.distributed import Processes
from segue.training.evaluation import Evaluator
from tests.helpers.command import call

ATTENTION = {
    "llama": "model.layers.*.self_attn",
    "qwen": "model.layers.*.self_attn",
    "mistral": "model.layers.*.self_attn",
    "gpt2": "transformer.h.*.attn",
    "masked": "bert.encoder.layer.*.attention.self",
    "labels": "bert.encoder.layer.*.attention.self",
    "encoder": "encoder.layer.*.attention.self",
    "vit": "vit.layers.*.attention",
}
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
POSITIONS = 64
STUDENT = "WindowedLinear(window=4)"
FILES = {"README.md", "config.json", "curve.json", "curve.png", "manifest.json", "model.safetensors", "segue.json"}


def text(words: int = 3000, seed: int = 0) -> str:
    """Count upwards from random numbers, so that there is something to learn."""
    chance, lines = random.Random(seed), []
    while words > 0:
        begin, count = chance.randrange(8), chance.randrange(3, 6)
        lines.append(" ".join(WORDS[(begin + i) % 12] for i in range(count)))
        words -= count
    return ".\n".join(lines)


def tokenizer() -> Any:
    """Learn a byte-level tokenizer that marks both ends of a text and knows a mask."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<end>", "<start>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    learned.train_from_iterator([text(500)], trainer)
    learned.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 2), ("<end>", 1)]
    )
    names = {"pad_token": "<pad>", "eos_token": "<end>", "cls_token": "<start>", "sep_token": "<end>", "mask_token": "<mask>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=learned, padding_side="left", **names)


def config(kind: str, vocabulary: int = 300) -> Any:
    """Return the settings of a model of two layers, 32 numbers wide."""
    marks = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    wide = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    long = {"max_position_embeddings": POSITIONS, "vocab_size": vocabulary}
    if kind == "gpt2":
        return transformers.GPT2Config(vocab_size=vocabulary, n_positions=POSITIONS, n_embd=32, n_layer=2, n_head=2, **marks)
    if kind == "llama":
        return transformers.LlamaConfig(**wide, **long, **marks, num_key_value_heads=1)
    if kind == "qwen":
        return transformers.Qwen2Config(**wide, **long, **marks, num_key_value_heads=2, tie_word_embeddings=True)
    if kind == "mistral":
        return transformers.MistralConfig(**wide, **long, **marks, num_key_value_heads=1, head_dim=16, sliding_window=None)
    if kind == "vit":
        return transformers.ViTConfig(**wide, image_size=8, patch_size=4, num_labels=2)
    return transformers.BertConfig(**wide, **long, pad_token_id=0, num_labels=2)


CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen": "Qwen2ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "masked": "BertForMaskedLM",
    "labels": "BertForSequenceClassification",
    "encoder": "BertModel",
    "vit": "ViTForImageClassification",
}


def model(kind: str, seed: int = 0) -> Any:
    """Build a model with random weights that are large enough for its modules to matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = getattr(transformers, CLASSES[kind])(config(kind)).eval()
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.2)
    return made


def save(kind: str, folder: Path, **how: Any) -> Path:
    """Write a model as its users have it: weights, settings, and how it reads."""
    model(kind).save_pretrained(folder, **how)
    if kind == "vit":
        seen = transformers.ViTImageProcessor(
            size={"height": 8, "width": 8}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]
        )
        seen.save_pretrained(folder)
    else:
        tokenizer().save_pretrained(folder)
    return folder


def options(kind: str, data: Path | str, out: Path, **given: Any) -> list[str]:
    """Return the arguments after `segue convert MODEL`; those given override the defaults."""
    small = {"sites": ATTENTION[kind], "student": "LinearAttention", "steps": 4, "batch": 4, "tokens": 16, "evaluations": 2}
    arguments = []
    for name, value in {**small, "data": data, "out": out, **given}.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(option)
        elif value is not None:
            arguments += [part for each in (value if isinstance(value, list) else [value]) for part in (option, str(each))]
    return arguments


def convert(kind: str, base: Path | str, data: Path | str, out: Path, **given: Any) -> str:
    return call("convert", base, *options(kind, data, out, **given))


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "segue.json").read_text())


def seal(folder: Path) -> None:
    """Write the manifest and its digest again, as somebody would who wants a changed folder to be accepted."""
    card, digest = folder / "README.md", manifest.write(folder)
    card.write_text(manifest.SHOWN.sub(manifest.line(digest).removeprefix("- **Digest**: "), card.read_text()))


def points(folder: Path) -> list[dict[str, Any]]:
    """Return the evaluations during a conversion."""
    return [json.loads(line) for line in (folder / "training" / "metrics.jsonl").read_text().splitlines()]


def assert_same_conversion(out: Path, converted: Path) -> None:
    """Compare two folders bit for bit, times left out."""
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (converted / name).read_bytes(), name
    assert record(out)["quality"] == record(converted)["quality"]
    assert set(manifest.listed(out)) == set(manifest.listed(converted))
    curves = [json.loads((place / "curve.json").read_text()) for place in (out, converted)]
    for point in (point for curve in curves for point in curve["points"]):
        del point["seconds"]
    assert curves[0] == curves[1]


def types(path: Path) -> set[str]:
    with safe_open(path, "pt") as file:
        return {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


def quality(folder: Path) -> float:
    """Evaluate the model of a folder on what its conversion held out, by transformers' own loss."""
    settings = Conversion.from_dict(record(folder)["conversion"])
    held_out = load(open_base(settings.model), settings).held_out
    loaded, total, count = segue.from_pretrained(folder), 0.0, 0
    with torch.no_grad():
        for batch in held_out:
            labels = batch.get("labels", batch["input_ids"])
            counted = int((labels != -100).sum())
            total += loaded(**{**batch, "labels": labels}).loss.item() * counted
            count += counted
    return math.exp(total / count)


def settings(source: Path, **given: Any) -> Conversion:
    """Return settings that only say how data is read."""
    needed = {"model": "", "sites": "", "student": "", "steps": 1}
    return Conversion(**{**needed, "data": str(source), "batch": 4, "tokens": 16, "validation": 0.1, **given})


def epoch(found: Data, number: int = 0) -> list[Any]:
    found.train.set_epoch(number)
    return list(found.train)


def scores(base: Base, found: Data) -> dict[str, float]:
    return Evaluator(found.held_out, found.task.scores, Processes(torch.device("cpu")), torch.no_grad)(base.model)
