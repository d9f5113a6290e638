"""The studies: a model with six sites, a student, data, and a short fixed recipe."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import segue
from segue.convert import recipes
from segue.convert.options import Conversion
from segue.data.digits import Digits
from segue.data.tsv import Tsv
from segue.diagnostics.costs import cost
from segue.lab.small_vit import VisionTransformer
from segue.phases import Phase, Rates
from segue.planning import Frontier
from segue.planning.solving import Budget
from segue.students import Drop, LinearAttention, NarrowMlp, StudentFactory, WindowedLinear
from segue.training.batches import Batches

TEXT = 200_000  # characters that are read

Batch = dict[str, Tensor]
RATES = Rates(new=1e-2, copied=1e-4, backbone=1e-5)  # of the causal model; fixed, whatever `segue convert` does by default
DIGITS_STEPS = 1500  # of the teacher of both studies on digits


@dataclass(frozen=True)
class Study:
    """What all trainings of a study share; a batch has the arguments of the model, and labels."""

    name: str
    model: nn.Module  # the original; every training has a copy
    sites: str
    student: StudentFactory
    train: Batches
    planning: Batches  # of the same data, in batches of the planners' size
    held_out: list[Batch]
    steps: int
    lr: float | Rates
    train_mode: str = "students"  # what trains: the students, or all where they have no weights
    budget: Budget = field(default_factory=lambda: Frontier(saves="parameters"))
    cost_batch: Any = None  # whose costs the plan is told; by default a batch to plan on
    convert_batch: Batch | None = None  # of a default conversion; by default eight examples to train on
    known: dict[int, Tensor] = field(default_factory=dict)  # what the original predicts for held-out batches

    def planning_batches(self, seed: int) -> list[Any]:
        """Return the first batches of an epoch of their own, without labels; more are never read."""
        self.planning.set_epoch(10_000 + seed)
        return [inputs(batch) for batch in islice(self.planning, 64)]


def inputs(batch: Batch) -> Any:
    """Return the arguments of the model."""
    given = {name: x for name, x in batch.items() if name != "labels"}
    return given.get("images", given)


def logits_for(model: nn.Module, batch: Batch) -> Tensor:
    """Return the predictions of a model for a batch."""
    given = inputs(batch)
    output = model(**given) if isinstance(given, dict) else model(given)
    return getattr(output, "logits", output).float()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy of the labels; of the next tokens where they are the tokens themselves."""
    return _cross_entropy(logits_for(model, batch), batch)


def _cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    if "labels" in batch:
        return F.cross_entropy(logits, batch["labels"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


@torch.no_grad()
def evaluated(study: Study, model: nn.Module) -> dict[str, float]:
    """Return the loss on held-out data, the KL from the original, how many first choices differ, and the accuracy of labels."""
    sums = dict.fromkeys(("loss", "kl", "differing", "right"), 0.0)
    count = 0
    for i, batch in enumerate(study.held_out):
        if i not in study.known:
            study.known[i] = logits_for(study.model, batch).flatten(0, -2).log_softmax(-1)
        logits = logits_for(model, batch)
        before, after = study.known[i], logits.flatten(0, -2).log_softmax(-1)
        sums["loss"] += len(before) * float(_cross_entropy(logits, batch))
        sums["kl"] += float(F.kl_div(after, before, reduction="sum", log_target=True))
        sums["differing"] += float((before.argmax(-1) != after.argmax(-1)).sum())
        if "labels" in batch:
            sums["right"] += float((logits.argmax(-1) == batch["labels"]).sum())
        count += len(before)
    return {name: value / count for name, value in sums.items()}


def stories(*, model: str, data: str, steps: int = 20, rows: int = 2, tokens: int = 128, held_out: int = 16, **_: Any) -> Study:
    """A causal model on text: windowed linear attention at each of its layers.

    Its vocabulary is cut to the tokens of the text, because a head for 32,000 would take most of the time.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor(tokenizer(Path(data).read_text(encoding="utf-8")[:TEXT], verbose=False)["input_ids"])
    used, ids = ids[: len(ids) // tokens * tokens].unique(return_inverse=True)
    pieces = ids.reshape(-1, tokens)
    train, kept = pieces[:-held_out], pieces[-held_out:]

    def batches(size: int) -> Batches:
        return Batches(len(train), size, lambda chosen, _: {"input_ids": train[chosen]}, seed=0)

    original = AutoModelForCausalLM.from_pretrained(model).eval()
    original.set_input_embeddings(nn.Embedding.from_pretrained(original.get_input_embeddings().weight.data[used], freeze=False))
    original.config.vocab_size = len(used)
    original.lm_head = nn.Linear(original.config.hidden_size, len(used), bias=False)
    original.tie_weights()
    return Study(
        "stories",
        original,
        "model.layers.*.self_attn",
        WindowedLinear(window=16),
        batches(rows),
        batches(4),
        [{"input_ids": part} for part in kept.split(4)],
        steps,
        RATES,
        budget=Frontier(saves="cache_bytes"),
        convert_batch={"input_ids": torch.zeros(8, Conversion.tokens, dtype=torch.long)},
    )


def minilm(
    *, model: str, data: str, test: str, work: Path, steps: int = 20, rows: int = 8, teacher_steps: int = 250, **_: Any
) -> Study:
    """A classifier of sentences: linear attention in each of its layers; the classifier is trained once, in `work`.

    A batch to train on has sentences of about one length, so that hardly anything of it is padding; one to plan on has any.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer, found = AutoTokenizer.from_pretrained(model), Tsv(train=data, test=test)()
    how = {"padding": "max_length", "truncation": True, "max_length": 32, "return_tensors": "pt"}
    texts = {"train": tokenizer(found.train_texts, **how), "test": tokenizer(found.test_texts, **how)}
    answers = {"train": found.train_labels, "test": found.test_labels}
    by_length = {name: x["attention_mask"].sum(1).argsort(stable=True) for name, x in texts.items()}

    def made(name: str, chosen: Tensor) -> Batch:
        longest = int(texts[name]["attention_mask"][chosen].sum(1).max())
        return {**{key: x[chosen, :longest] for key, x in texts[name].items()}, "labels": answers[name][chosen]}

    def batches(size: int) -> Batches:
        blocks = by_length["train"][: len(answers["train"]) // size * size].reshape(-1, size)
        return Batches(len(blocks), 1, lambda chosen, _: made("train", blocks[chosen[0]]), seed=0)

    place = work / "minilm_teacher"
    if not place.exists():
        torch.manual_seed(0)
        teacher = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2)
        _trained(teacher, batches(32), teacher_steps, 1e-4).save_pretrained(place)
    original = AutoModelForSequenceClassification.from_pretrained(place).eval()
    evaluated = [made("test", chosen) for chosen in by_length["test"][::6].split(32)]  # of all lengths
    name = next(name for name, _ in original.named_modules() if name.endswith("layer.0.attention.self"))
    sites, student = name.replace("layer.0", "layer.*"), LinearAttention()
    planning = Batches(len(answers["train"]), 16, lambda chosen, _: made("train", chosen), seed=0)
    costs = {"budget": Frontier(saves="flops"), "cost_batch": {"input_ids": torch.arange(512)[None]}}
    costs["convert_batch"] = made("train", torch.arange(Conversion.batch))
    return Study("minilm", original, sites, student, batches(rows), planning, evaluated, steps, 5e-4, **costs)


def _digits(name: str, sites: str, student: StudentFactory, work: Path, steps: int, **settings: Any) -> Study:
    data = Digits()()
    pixels = {part: getattr(data, part).inputs.float() / 127.5 - 1 for part in ("train", "test")}
    answers = {part: getattr(data, part).labels for part in ("train", "test")}
    torch.manual_seed(0)
    original = VisionTransformer(pixels=8, channels=1, patch=2, width=48, depth=6, heads=4, classes=10)

    def made(part: str, chosen: Tensor) -> Batch:
        return {"images": pixels[part][chosen], "labels": answers[part][chosen]}

    def batches(size: int) -> Batches:
        return Batches(len(answers["train"]), size, lambda chosen, _: made("train", chosen), seed=0)

    place = work / "digits_teacher.pt"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        torch.save(_trained(original, batches(32), DIGITS_STEPS, 1e-3).state_dict(), place)
    original.load_state_dict(torch.load(place, weights_only=True))
    evaluated = [made("test", chosen) for chosen in torch.arange(len(answers["test"])).split(125)]
    return Study(name, original.eval(), sites, student, batches(32), batches(32), evaluated, steps, 1e-3, **settings)


def drop(*, work: Path, steps: int = 30, **_: Any) -> Study:
    """A small vision transformer on digits: each block may be left out."""
    return _digits("drop", "blocks.*", Drop(), work, steps, train_mode="all")


def narrow(*, work: Path, steps: int = 30, **_: Any) -> Study:
    """The same: each MLP may be four times narrower."""
    return _digits("narrow", "blocks.*.mlp", NarrowMlp(ratio=0.25), work, steps)


def linear(*, work: Path, steps: int = 30, **_: Any) -> Study:
    """The same: each attention may be linear. It was run once, after the planner was chosen on the other studies."""
    return _digits("linear", "blocks.*.attn", LinearAttention(), work, steps, budget=Frontier(saves="flops"))


STUDIES: dict[str, Callable[..., Study]] = {
    "stories": stories,
    "minilm": minilm,
    "drop": drop,
    "narrow": narrow,
    "linear": linear,
}


def _trained(model: nn.Module, batches: Batches, steps: int, lr: float) -> Any:
    """Train all of an original; its rate rises for a tenth of the steps and then falls to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, 10 * (i + 1) / steps) * (1 - i / steps))
    model.train()
    for batch, _ in zip(_endless(batches), range(steps), strict=False):
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
    return model


def _endless(batches: Batches) -> Iterator[Batch]:
    epoch = 0
    while True:
        batches.set_epoch(epoch)
        yield from batches
        epoch += 1


def plan_of(study: Study, chosen: tuple[str, ...], seed: int) -> segue.Plan:
    """Return the fixed recipe for a subset: DCR with guidance and distillation; of a causal model a transfer, then KL."""
    if study.name == "stories":
        local = Phase(name="transfer", length=0.5, local=True, task=0.0, lr=RATES, weight_decay=0.0)
        alone = Phase(name="students alone", lr=RATES, task=0.0)
        return segue.methods.transfer(sites=chosen, student=study.student, phases=(local, alone), seed=seed)
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


def training_flops(study: Study, chosen: tuple[str, ...]) -> float:
    """Count the operations of one training of a subset, on its first batch; others take as many for each input."""
    study.train.set_epoch(0)
    batches = [batch for batch, _ in zip(_endless(study.train), range(study.steps), strict=False)]
    mean = sum(map(_inputs, batches)) / len(batches)
    first = cost(study.model, plan_of(study, chosen, 0), batches[0], total_steps=study.steps, loss_fn=loss).flops
    return first * mean / _inputs(batches[0])


def _inputs(batch: Batch) -> int:
    return next(iter(batch.values())).numel()


def convert_flops(study: Study) -> float:
    """Count the operations of `segue convert` with its defaults, on all sites."""
    method = recipes.METHODS["causal"] if study.name == "stories" else recipes.METHOD
    plan = segue.methods.ALL[method](sites=study.sites, student=study.student, train=study.train_mode)
    batch = study.convert_batch or {name: x[: Conversion.batch] for name, x in next(iter(study.train)).items()}
    return cost(study.model, plan, batch, total_steps=recipes.STEPS, loss_fn=loss).flops
