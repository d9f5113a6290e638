"""A real language model: all attention of stories15M to operators of constant memory, judged by KL and equal first choices.

Command:  segue grid experiments/stories15m --out runs/stories15m --workers 2 -o model=stories15m -o text=text.safetensors
          python -m experiments.stories15m.report runs/stories15m    (without a folder: from the committed results)
Needs:    the model's folder and its own texts, made by model.py and sample.py in this folder.
Runtime:  60 runs, two to three minutes of one thread each.
Expected: docs/single-experiments.md; results/ holds what its tables are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from segue import methods
from segue.data.files import quiet_transformers
from segue.errors import ConfigError
from segue.lab.config import Run, Teacher
from segue.lab.tasks import Loaded
from segue.losses import FeatureGuidance, LogitDistillation
from segue.phases import Phase, Rates
from segue.plan import Plan
from segue.schedules import aggr20
from segue.sites import Selector
from segue.students import GatedDeltaNet, GatedLinear, LinearAttention, SlidingWindow, StudentFactory, WindowedLinear
from segue.training.batches import Batches, InOrder
from segue.training.recipe import Recipe

HELD_OUT, AT_ONCE = 16, 8  # sequences
REPEATED = 96  # tokens in random order, twice: recall reaches further back than a window of 32
RATES = Rates(new=1e-2, copied=1e-4)
AFTER_FIT = Rates(new=3e-4, copied=3e-5)  # what suits a local fit is too much after it (docs/lab-log.md)


@lru_cache(maxsize=1)
def original(folder: str) -> nn.Module:
    """Load the untouched model, which every evaluation compares with."""
    loaded: nn.Module = quiet_transformers(folder).AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)
    return loaded.eval().requires_grad_(False)


@lru_cache(maxsize=HELD_OUT // AT_ONCE)
def original_predictions(folder: str, shape: tuple[int, ...], tokens: bytes) -> Tensor:
    """Return log-probabilities by the untouched model: every evaluation compares with the same ones."""
    return logits_of(original(folder), torch.frombuffer(bytearray(tokens), dtype=torch.long).view(shape)).log_softmax(-1)


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the predictions of all tokens but the first."""
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return logits


@dataclass(frozen=True)
class NextToken:
    """The loss of the next token; scores compare with the original: KL in nats, and how often the first choice is the same.

    Recall is how often the second copy of tokens in random order is predicted, whose first copy is `REPEATED` tokens back.
    """

    folder: str

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        ids = batch["input_ids"]
        return F.cross_entropy(logits_of(model, ids).flatten(0, 1), ids[:, 1:].flatten())

    def scores(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the mean over each text."""
        return {**self.compared(model, batch), "recall": self._recall(model, batch["input_ids"])}

    def compared(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the scores that need one forward of the text."""
        ids = batch["input_ids"]
        ours = logits_of(model, ids).log_softmax(-1)
        theirs = original_predictions(self.folder, tuple(ids.shape), ids.cpu().numpy().tobytes()).to(ids.device)
        return {
            "agreement": (ours.argmax(-1) == theirs.argmax(-1)).float().mean(1),
            "kl": (theirs.exp() * (theirs - ours)).sum(-1).mean(1),
            "loss": -ours.gather(-1, ids[:, 1:, None]).mean((1, 2)),
        }

    def _recall(self, model: nn.Module, ids: Tensor) -> Tensor:
        order = torch.randperm(REPEATED, generator=torch.Generator().manual_seed(0)).to(ids.device)
        copied = ids[:, 1:][:, order]
        twice = torch.cat([ids[:, :1], copied, copied], dim=1)
        hits = logits_of(model, twice).argmax(-1) == twice[:, 1:]
        return hits[:, -REPEATED + 1 :].float().mean(1)


@dataclass(frozen=True, kw_only=True)
class Stories:
    """Texts that the model itself wrote: the last are held out."""

    model: str
    text: str

    score = "agreement"
    head = "lm_head.*"

    @property
    def sites(self) -> Selector:
        return "model.layers.*.self_attn"

    @property
    def loss(self) -> Any:
        return NextToken(self.model)

    def load(self, *, data_fraction: float = 1.0, seed: int = 0) -> Loaded:
        """Load the texts."""
        if data_fraction != 1:
            raise ConfigError("this experiment uses all of its texts.", f"Asked for are {data_fraction}.", "leave it out.")
        ids = load_file(self.text)["input_ids"].long()
        train, held = ids[:-HELD_OUT], ids[-HELD_OUT:]
        validation = InOrder(len(held), AT_ONCE, lambda chosen: {"input_ids": held[chosen]})
        return Loaded(
            train=lambda size, seed: Batches(len(train), size, lambda chosen, _: {"input_ids": train[chosen]}, seed=seed),
            validation=validation,
            final=validation,
            build=lambda _: quiet_transformers(self.model).AutoModelForCausalLM.from_pretrained(
                self.model, use_safetensors=True
            ),
            examples=len(train),
        )


@dataclass(frozen=True)
class Arm:
    """One line of a table."""

    name: str
    label: str
    plan: Callable[..., Plan]
    length: float = 1.0  # in steps of DCR + DFG + KL, so that all arms of a table cost the same number of operations


KL = LogitDistillation(temperature=1.0)
WINDOW = {"window": 32, "sinks": 4}
OPERATORS: dict[str, StudentFactory] = {
    "Linear, hedgehog": LinearAttention(feature_map="hedgehog"),
    "Gated linear": GatedLinear(),
    "Gated delta": GatedDeltaNet(),
    "Window 32": SlidingWindow(**WINDOW),
    "Window 32 + linear, no sink": WindowedLinear(window=32, sinks=0),
    "Window 32 + linear": WindowedLinear(**WINDOW),
    "Window 32 + linear, window dropout": WindowedLinear(**WINDOW, window_dropout=0.5),
}
COMPARED = ("Window 32 + linear", "Gated delta")  # the operators on which methods are compared


def phased(*phases: Phase) -> Callable[..., Plan]:
    """Follow these phases with feature guidance and distillation, without the task's loss."""
    return partial(Plan, phases=phases, guidance=FeatureGuidance(), distill=KL)


LOCAL = Phase(name="local fit", length=0.3, local=True, task=0.0, lr=RATES, weight_decay=0.0)
HANDOVER = Phase(name="handover", schedule=aggr20(), task=0.0, lr=RATES)
ALONE = Phase(name="students alone", task=0.0, lr=RATES)
AFTER = {"lr": AFTER_FIT, "warmup": 0.1, "fresh": True}
IN_PARTS = replace(LOCAL, split=8)  # eight updates from each forward of the original, at the same number of operations


def lolcats(**settings: Any) -> Plan:
    """LoLCATs with rates of their own for its two halves; the second learns from the next token."""
    plan = methods.lolcats(**settings)
    first, second = plan.phases
    return replace(plan, phases=(replace(first, lr=RATES), replace(second, **AFTER)))


DCR_DFG_KL = Arm("dcr_dfg_kl", "DCR + DFG + KL", phased(HANDOVER))
METHODS = (
    DCR_DFG_KL,
    Arm("student_only", "Student only", methods.student_only, 1.45),
    Arm("kl", "KL", phased(ALONE), 1.01),
    Arm("lolcats", "LoLCATs", lolcats, 1.72),
    Arm("radlads", "RADLADS-style: align, then KL", phased(LOCAL, replace(ALONE, **AFTER)), 1.28),
    Arm("fit_dcr_dfg_kl", "Local fit, then DCR + DFG + KL", phased(IN_PARTS, replace(HANDOVER, **AFTER)), 1.27),
    Arm("transfer", "Transfer, the default of `segue convert`", methods.transfer, 2.15),
)


def runs(model: str, text: str, seeds: int = 3, steps: int = 60, batch: int = 4, only: str = "") -> list[Run]:
    """Return operators x seeds by one method, then methods x seeds on two operators, then half of the layers."""
    task = Stories(model=model, text=text)
    half = tuple(f"model.layers.{layer}.self_attn" for layer in (1, 3, 5))
    cases = [(DCR_DFG_KL, operator, task.sites, operator) for operator in OPERATORS]
    cases += [(arm, operator, task.sites, operator) for operator in COMPARED for arm in METHODS[1:]]
    cases.append((DCR_DFG_KL, COMPARED[0], half, f"{COMPARED[0]}, 3 of 6 layers"))
    return [
        Run(
            experiment="stories15m",
            method=arm.name,
            label=arm.label,
            group=group,
            plan=arm.plan(sites=sites, student=OPERATORS[operator], seed=seed),
            task=task,
            teacher=Teacher(task=task, stages=()),
            recipe=Recipe(steps=round(arm.length * steps), lr=RATES, warmup=0.05, weight_decay=0.0, seed=seed),
            batch=batch,
            evaluations=4,
            diagnostics=(),
            seed=seed,
            reference="student_only",
        )
        for seed in range(seeds)
        for arm, operator, sites, group in cases
        if only in f"{arm.name} {group}"
    ]
