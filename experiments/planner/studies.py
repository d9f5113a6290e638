"""The studies: a model with six sites, a student, data, and a short fixed recipe."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import segue
from segue.data.digits import Digits
from segue.data.tsv import Tsv
from segue.lab.small_vit import VisionTransformer
from segue.students import Drop, NarrowMlp, StudentFactory, WindowedLinear
from segue.training.batches import Batches

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Study:
    """What all trainings of a study share; a batch has the arguments of the model, and labels."""

    name: str
    model: nn.Module  # the original; every training has a copy
    sites: str
    student: StudentFactory
    train: Batches
    held_out: list[Batch]
    steps: int
    lr: float
    train_mode: str = "students"  # what trains: the students, or all where they have no weights

    def planning_batches(self, count: int) -> list[Any]:
        """Return the first batches of an epoch of their own, without labels."""
        self.train.set_epoch(10_000)
        found = [inputs(batch) for batch, _ in zip(self.train, range(count), strict=False)]
        self.train.set_epoch(0)
        return found


def inputs(batch: Batch) -> Any:
    """Return the arguments of the model."""
    given = {name: x for name, x in batch.items() if name != "labels"}
    return given.get("images", given)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy of the labels; of the next tokens where they are the tokens themselves."""
    given = inputs(batch)
    output = model(**given) if isinstance(given, dict) else model(given)
    logits = getattr(output, "logits", output).float()
    if "labels" in batch:
        return F.cross_entropy(logits, batch["labels"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def stories(*, model: str, data: str, steps: int = 60, rows: int = 4, tokens: int = 128, held_out: int = 16, **_: Any) -> Study:
    """A causal model on text: windowed linear attention at each of its layers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor(tokenizer(Path(data).read_text(encoding="utf-8"), verbose=False)["input_ids"])
    pieces = ids[: len(ids) // tokens * tokens].reshape(-1, tokens)
    train, kept = pieces[:-held_out], pieces[-held_out:]
    batches = Batches(len(train), rows, lambda chosen, _: {"input_ids": train[chosen]}, seed=0)
    original = AutoModelForCausalLM.from_pretrained(model).eval()
    evaluated = [{"input_ids": part} for part in kept.split(rows)]
    student = WindowedLinear(window=16)
    return Study("stories", original, "model.layers.*.self_attn", student, batches, evaluated, steps, 1e-3)


def minilm(
    *, model: str, data: str, test: str, work: Path, steps: int = 60, rows: int = 16, teacher_steps: int = 300, **_: Any
) -> Study:
    """A classifier of sentences: linear attention in each of its layers; its head is trained once, in `work`."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer, found = AutoTokenizer.from_pretrained(model), Tsv(train=data, test=test)()
    how = {"padding": "max_length", "truncation": True, "max_length": 48, "return_tensors": "pt"}
    texts = {"train": tokenizer(found.train_texts, **how), "test": tokenizer(found.test_texts, **how)}
    answers = {"train": found.train_labels, "test": found.test_labels}

    def made(name: str, chosen: Tensor) -> Batch:
        return {**{key: x[chosen] for key, x in texts[name].items()}, "labels": answers[name][chosen]}

    batches = Batches(len(answers["train"]), rows, lambda chosen, _: made("train", chosen), seed=0)
    place = work / "minilm_teacher"
    if not place.exists():
        teacher = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2)
        _trained(teacher, batches, teacher_steps, 2e-5).save_pretrained(place)
    original = AutoModelForSequenceClassification.from_pretrained(place).eval()
    kept = torch.arange(min(512, len(answers["test"])))
    evaluated = [made("test", chosen) for chosen in kept.split(64)]
    name = next(name for name, _ in original.named_modules() if name.endswith("layer.0.attention.self"))
    sites = name.replace("layer.0", "layer.*")
    return Study("minilm", original, sites, segue.students.LinearAttention(), batches, evaluated, steps, 5e-4)


def _digits(name: str, sites: str, student: StudentFactory, work: Path, steps: int, **settings: Any) -> Study:
    data = Digits()()
    pixels = {part: getattr(data, part).inputs.float() / 127.5 - 1 for part in ("train", "test")}
    answers = {part: getattr(data, part).labels for part in ("train", "test")}
    torch.manual_seed(0)
    original = VisionTransformer(pixels=8, channels=1, patch=2, width=48, depth=6, heads=4, classes=10)

    def made(part: str, chosen: Tensor) -> Batch:
        return {"images": pixels[part][chosen], "labels": answers[part][chosen]}

    batches = Batches(len(answers["train"]), 32, lambda chosen, _: made("train", chosen), seed=0)
    place = work / "digits_teacher.pt"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        torch.save(_trained(original, batches, 400, 1e-3).state_dict(), place)
    original.load_state_dict(torch.load(place, weights_only=True))
    evaluated = [made("test", chosen) for chosen in torch.arange(len(answers["test"])).split(125)]
    return Study(name, original.eval(), sites, student, batches, evaluated, steps, 1e-3, **settings)


def drop(*, work: Path, steps: int = 60, **_: Any) -> Study:
    """A small vision transformer on digits: each block may be left out."""
    return _digits("drop", "blocks.*", Drop(), work, steps, train_mode="all")


def narrow(*, work: Path, steps: int = 60, **_: Any) -> Study:
    """The same: each MLP may be four times narrower."""
    return _digits("narrow", "blocks.*.mlp", NarrowMlp(ratio=0.25), work, steps)


STUDIES: dict[str, Callable[..., Study]] = {"stories": stories, "minilm": minilm, "drop": drop, "narrow": narrow}


def _trained(model: nn.Module, batches: Batches, steps: int, lr: float) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model.train()
    for batch, _ in zip(_endless(batches), range(steps), strict=False):
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _endless(batches: Batches) -> Iterator[Batch]:
    epoch = 0
    while True:
        batches.set_epoch(epoch)
        yield from batches
        epoch += 1


def plan_of(study: Study, chosen: tuple[str, ...], seed: int) -> segue.Plan:
    """Return the fixed recipe for a subset: DCR with guidance and distillation."""
    return segue.methods.dcr_dfg(
        sites=chosen,
        student=study.student,
        distill=segue.losses.LogitDistillation(),
        train=study.train_mode,
        teacher_gradient=study.name == "drop" or None,
        seed=seed,
    )


def trained(study: Study, chosen: tuple[str, ...], seed: int) -> nn.Module:
    """Train one subset."""
    model = copy.deepcopy(study.model).train()
    plan = plan_of(study, chosen, seed)
    recipe = segue.Recipe(steps=study.steps, lr=study.lr, warmup=0.1, seed=seed)
    batches = Batches(study.train.count, study.train.size, study.train.make, seed=seed)
    found = segue.fit(model, plan, batches, lambda m, batch: loss(m, batch), recipe=recipe, evaluations=1, progress=None)
    assert found.handover is not None
    return found.handover.finalize_().eval()
