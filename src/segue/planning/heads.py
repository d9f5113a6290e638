"""Which softmax heads a mixture keeps: those that the model misses most while all heads are replaced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from segue.border import NotNegative, PositiveInt, Seed, checked
from segue.core.handover import Handover
from segue.errors import PlanError
from segue.planning.candidates import Candidates, Option, candidates_on
from segue.planning.damage import divergences, require_logits
from segue.planning.signals import Signal, on_batches
from segue.planning.signals import recall as recall_signal
from segue.sites import Selector
from segue.students import MixedHeads
from segue.students.attention.module import Attention
from segue.training.progress import Progress

NONE, SOME = "no heads kept", "some heads kept"


@dataclass(frozen=True)
class ChosenHeads:
    """A mixture that keeps the heads whose return helps most, and what each of them is worth."""

    student: MixedHeads
    gains: dict[str, list[float]]  # by site, for each of its heads: how much KL is less if this head alone is kept
    kl_without: float  # from the original, per prediction, if all heads are replaced
    kl: float  # if the chosen heads are kept


@checked
def choose_heads(
    model: nn.Module,
    sites: Selector,
    mixture: MixedHeads,
    batches: Iterable[Any],
    *,
    keep: PositiveInt,
    recall: NotNegative = 0.0,
    seed: Seed = 0,
    progress: str | None = "choosing heads",
) -> ChosenHeads:
    """Choose the heads that stay softmax attention, over all sites together, by forwards alone; the model stays as it is.

        chosen = segue.planning.choose_heads(
            model,
            "model.layers.*.self_attn",
            segue.students.MixedHeads(),
            batches,
            keep=4,
            recall=1.0,
        )
        plan = segue.methods.transfer("model.layers.*.self_attn", student=chosen.student)

    All heads are replaced, then each is put back alone: those that bring the most KL back are kept. That two heads may do the
    same work is not seen.

    Args:
        model: A model that returns logits.
        sites: Where, as in `segue.Plan`.
        mixture: The operator of the other heads, and how the projections start; the heads that it keeps are not read.
        batches: Batches to measure on.
        keep: How many heads stay, of all sites together.
        recall: The weight of retrieval beside the batches, for causal language models: what softmax heads are needed for most.
        seed: The seed of new weights, and of what is recalled.
        progress: The name of the progress bar; None shows none.
    """
    measured = [on_batches(batches)]
    require_logits(model, measured[0].batches)
    if recall:
        measured.append(recall_signal(model, weight=recall, seed=seed))
    with candidates_on(model, sites, {NONE: replace(mixture, keep=())}, measured[0].batches[0], seed) as found:
        _refuse_unfit(found)
        heads = {site: cast(Attention, found.students[site, NONE]).heads for site in found.sites}
        if keep > sum(heads.values()):
            raise PlanError(
                f"keep must be at most {sum(heads.values())}, got {keep}.",
                f"So many heads have the {len(heads)} sites together.",
                "keep fewer. Nothing was changed.",
            )
        without = _damage(found, measured, {})
        show, gains = Progress(progress, sum(heads.values())), {site: [0.0] * count for site, count in heads.items()}
        places = [(site, head) for site, count in heads.items() for head in range(count)]
        for done, (site, head) in enumerate(places, start=1):
            gains[site][head] = without - _damage(found, measured, {site: replace(mixture, keep=(head,))})
            show(done, site)
        ranked = sorted(((-gain, site, head) for site, each in gains.items() for head, gain in enumerate(each)))
        kept: dict[int | str, tuple[int, ...]] = {
            site: tuple(sorted(head for _, of, head in ranked[:keep] if of == site)) for site in heads
        }
        student = replace(mixture, keep=kept)
        return ChosenHeads(student, gains, without, _damage(found, measured, dict.fromkeys(heads, student)))


def _refuse_unfit(found: Candidates) -> None:
    for (site, _), reason in found.refused.items():
        raise PlanError(
            f"the mixture does not fit the site {site!r}.", reason, "give sites that it can replace. Nothing was changed."
        )


def _damage(found: Candidates, measured: list[Signal], mixtures: dict[str, MixedHeads]) -> float:
    """Return the KL of the model with these mixtures, and with no head kept at the other sites, per prediction."""
    handover: Handover = found.handover
    made = {
        (site, SOME): student(handover.seams[site].require_teacher(), handover.seams[site].site)
        for site, student in mixtures.items()
    }
    shown: list[Option] = [(site, SOME if site in mixtures else NONE) for site in found.sites]
    tried = Candidates(handover, {**found.students, **made}, {})
    total = 0.0
    for signal in measured:
        each = [divergences(tried, batch, mask, [shown])[0] for batch, mask in zip(signal.batches, signal.masks, strict=True)]
        total += signal.weight * sum(one.kl for one in each) / sum(one.predictions for one in each)
    return total
