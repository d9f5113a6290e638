"""Stock Trainers of Hugging Face over tiny models, and what the processes of the tests run with them."""

from __future__ import annotations

from segue.integrations.transformers import HandoverCallback  # before PEFT: it lets torchvision import

# isort: split
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import segue
from segue.gates import Bernoulli, GumbelSoftmax
from segue.losses import FeatureGuidance, LogitDistillation
from segue.phases import Phase
from segue.schedules import Adaptive, Constant, Linear

STEPS, TAKEOVER = 12, 6
SITES = "bert.encoder.layer.*.attention.self"
SIZES = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 8, "initializer_range": 0.2,
}  # fmt: skip
GUIDANCE = FeatureGuidance(schedule=Constant(alpha=1.0))
PHASES = (
    Phase(name="local fit", length=0.5, local=True, lr=2e-2, weight_decay=0.0, warmup=0.5, split=2, reuse=2),
    Phase(name="handover", length=0.25, schedule=Linear()),
    Phase(name="after", lr=1e-3, guidance=0.1, task=0.5),
)


class Rows(Dataset):  # type: ignore[type-arg]
    """Rows of eight tokens, some of them padding."""

    def __init__(self, rows: int = 20, *, language: bool = False) -> None:
        self.rows, self.language = rows, language

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(1, 50, (8,), generator=torch.Generator().manual_seed(index))
        mask = (torch.arange(8) < 5 + index % 4).long()
        labels = ids.masked_fill(mask == 0, -100) if self.language else ids.sum() % 3
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def bert(dropout: float = 0.0) -> nn.Module:
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = transformers.BertConfig(**SIZES, num_labels=3, **drop)
    return _seeded(lambda: transformers.BertForSequenceClassification(config))


def llama(dropout: float = 0.0) -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0, attention_dropout=dropout)
    return _seeded(lambda: transformers.LlamaForCausalLM(config))


def with_lora() -> nn.Module:
    """Llama with LoRA in its MLPs; the adapters begin elsewhere in every process, as users' do."""
    torch.seed()
    return get_peft_model(llama(0.1), LoraConfig(target_modules=["up_proj", "down_proj"], r=2, lora_dropout=0.1))


class Plain(nn.Module):
    """A model that is not of Hugging Face: it takes no further arguments, so that Trainer divides its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.site, self.head = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head((self.site(self.embedding(input_ids)) * attention_mask[..., None]).mean(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _seeded(make: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def plan(**settings: Any) -> segue.Plan:
    return segue.Plan(**{"sites": SITES, "schedule": Linear(until=TAKEOVER / STEPS), "guidance": GUIDANCE, **settings})


def made(model: nn.Module, settings: segue.Plan, folder: Path | str, *, data: Any = None, **changes: Any):
    """Return a stock Trainer, with arguments changed, and the callback it was given."""
    more = {
        name: changes.pop(name)
        for name in ("compute_loss_func", "optimizers", "callbacks", "optimizer_cls_and_kwargs")
        if name in changes
    }
    callback, kind = changes.pop("callback", None) or HandoverCallback(settings), changes.pop("kind", transformers.Trainer)
    given = {
        "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "use_cpu": True, "report_to": [],
        "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "seed": 3, **changes,
    }  # fmt: skip
    more["callbacks"] = [callback, *more.get("callbacks", [])]
    arguments = transformers.TrainingArguments(str(folder), **given)
    rows = Rows() if data is None else data
    return kind(model, arguments, train_dataset=rows, eval_dataset=rows, **more), callback


CASES: dict[str, tuple[Any, segue.Plan, Any]] = {
    "soft coins, dropout everywhere": (lambda: bert(0.1), plan(gate=GumbelSoftmax(), backbone="train"), None),
    "hard coins, teachers released": (lambda: bert(0.1), plan(gate=Bernoulli(), release=True, guidance=None), None),
    "everything trains, distilled": (lambda: bert(0.1), plan(train="all", distill=LogitDistillation()), None),
    "phases": (lambda: bert(0.1), segue.methods.dcr_dfg(sites=SITES, distill=LogitDistillation(), phases=PHASES), None),
    "adaptive": (lambda: bert(0.1), plan(schedule=Adaptive(every=3, budget=2.0, until=0.5), distill=LogitDistillation()), None),
    "language": (lambda: llama(0.1), plan(sites="model.layers.*.self_attn", gate=GumbelSoftmax()), Rows(language=True)),
    "LoRA": (with_lora, plan(sites="model.layers.*.self_attn", train="all", gate=GumbelSoftmax()), Rows(language=True)),
}


def train(case: str, folder: Path | str, resume: str | None = None) -> dict[str, Tensor]:
    """Train to the end, from the beginning or from a checkpoint, and return the weights."""
    model, settings, data = CASES[case]
    splits = any(phase.split > 1 for phase in settings.phases)  # which takes no accumulation
    trainer, _ = made(
        model(),
        settings,
        folder,
        data=data,
        gradient_accumulation_steps=1 if splits else 2,
        save_strategy="steps",
        save_steps=4,
        max_grad_norm=0.5,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model.state_dict()


def resume_all(folder: str) -> None:
    """Continue every case from two checkpoints; what a process of its own does.

    They are of the middle of the blend and of the time after takeover; of the local phase and the blend where there are phases.
    """
    ends = {}
    for case in CASES:
        for step in (4, 8):
            place = Path(folder) / case / f"checkpoint-{step}"
            ends[f"{case}, {step}"] = train(case, Path(folder) / f"{case} {step}", str(place))
    torch.save(ends, Path(folder) / "ends.pt")


def train_as_rank(folder: Path) -> dict[str, Tensor]:
    """Train as one of two processes."""
    return train_alone(folder / str(torch.distributed.get_rank()), ddp_backend="gloo")


def train_alone(folder: Path | str, **changes: Any) -> dict[str, Tensor]:
    """Train on rows that two processes share out evenly, with every kind of auxiliary loss."""
    settings = plan(sites="model.layers.*.self_attn", gate=GumbelSoftmax(), distill=LogitDistillation())
    return by_sgd(llama(), settings, folder, data=Rows(16, language=True), **changes)


def fit_locally_as_rank(folder: Path) -> dict[str, Tensor]:
    """Take several updates per batch as one of two processes."""
    return fit_locally_alone(folder / f"local {torch.distributed.get_rank()}", ddp_backend="gloo")


def fit_locally_alone(folder: Path | str, **changes: Any) -> dict[str, Tensor]:
    """Take several updates per batch in the first half, on rows that two processes share out evenly."""
    phases = (Phase(name="local fit", length=0.5, local=True, split=2, reuse=2), Phase(name="alone"))
    settings = segue.Plan(sites="model.layers.*.self_attn", guidance=FeatureGuidance(), phases=phases)
    return by_sgd(llama(), settings, folder, data=Rows(16, language=True), max_steps=4, **changes)


BAD, KEPT = 8, 6  # a bad step, and that of the good state before it
GUARD = segue.Guard(warmup=3, window=4, every=3, recovery=3, alpha=0.2)
FALLING = plan(schedule=Linear(until=0.9))


@torch.no_grad()
def explode(model: Any) -> None:
    """Make a student a thousand times too large."""
    model.bert.encoder.layer[0].attention.self.student.value.weight.mul_(1e3)


class Explode(transformers.TrainerCallback):
    """Do so before a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == BAD:
            explode(model)


def guarded_as_rank(folder: Path) -> dict[str, Tensor]:
    """Train under a guard as one of two processes."""
    return guarded_alone(folder / f"guarded {torch.distributed.get_rank()}", ddp_backend="gloo")


def guarded_alone(folder: Path | str, **changes: Any) -> dict[str, Tensor]:
    """Train through a step that goes wrong, and return the weights, and the steps that were undone."""
    callback = HandoverCallback(FALLING, guard=GUARD)
    ended = by_sgd(bert(), FALLING, folder, data=Rows(16), callback=callback, callbacks=[Explode()], **changes)
    return {**ended, "undone": torch.tensor([event["step"] for event in callback.events])}


BY_SGD = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "train_sampling_strategy": "sequential"}


def by_sgd(model: nn.Module, settings: segue.Plan, folder: Path | str, **changes: Any) -> dict[str, Tensor]:
    """Train by plain gradient descent on the rows in their order, and return the weights."""
    trainer, _ = made(model, settings, folder, **BY_SGD, **changes)
    trainer.train()
    return trainer.model.state_dict()
