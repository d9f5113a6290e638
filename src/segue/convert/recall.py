"""Recall: whether a language model finds again what it has read, at several distances.

- text: held-out text, then the same again;
- words: random words, then the same again; models with induction heads continue the second copy;
- associative: pairs of words, ordinary text, then the first words again in another order: which one follows?
- retrieval: lines "key: value" that fill the context, then keys again: which value?

The words are single tokens of the held-out text. An answer is chosen among the values that are in the sequence, in a copy among
all tokens. The gain is how much less the answer surprises than the same token at its first occurrence, in nats: it also
tells models apart that are too small to answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from segue.convert.compare import SIDES, Models, at_once
from segue.reporting.statistics import bounded_interval, mean_interval, proportion_interval
from segue.training.progress import Progress

SEED = 0
LONGEST = 512  # tokens of a sequence, if the held-out pieces are not longer and the original has positions for it
NEAREST = 8  # tokens
SEQUENCES = 16  # of each distance, at least
COPIED = 1024  # tokens that are copied at each distance, at least
PAIRS = 8
QUESTIONS = 8  # about the lines of one sequence, at most
GROUPS = 4  # of questions at different distances, equally many in each


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Sequences with questions: the token after a place is the answer, and it stands after an earlier place too."""

    ids: Tensor  # (sequences, tokens)
    places: Tensor  # (sequences, questions)
    earlier: Tensor  # (sequences, questions)
    choices: Tensor | None = None  # (sequences, choices); None: all tokens
    distance: int | None = None  # on average; None: of every question its own

    def on(self, device: torch.device) -> Probe:
        """Return the same on a device."""
        tensors: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return dataclasses.replace(self, **tensors)

    @property
    def answers(self) -> Tensor:
        """The right answers, (sequences, questions)."""
        return self.ids.gather(1, self.places + 1)


@torch.no_grad()
def answered(model: Any, probe: Probe) -> dict[str, Tensor]:
    """Return whether every answer is right, its loss and its gain, (sequences, questions)."""
    found: dict[str, list[Tensor]] = {"accuracy": [], "loss": [], "gain": []}
    size = at_once(model, probe.ids.shape[1])
    for begin in range(0, len(probe.ids), size):
        part = slice(begin, begin + size)
        answers = probe.answers[part]
        logits = model(input_ids=probe.ids[part], use_cache=False).logits.float()
        asked, first = (
            logits.gather(1, places[part, :, None].expand(-1, -1, logits.shape[-1])) for places in (probe.places, probe.earlier)
        )
        losses = [F.cross_entropy(x.movedim(-1, 1), answers, reduction="none") for x in (first, asked)]
        found["loss"].append(losses[1].cpu())
        found["gain"].append((losses[0] - losses[1]).cpu())
        chosen = asked.argmax(-1)
        if probe.choices is not None:
            choices = probe.choices[part]
            among = asked.gather(2, choices[:, None].expand(-1, asked.shape[1], -1))
            chosen = choices.gather(1, among.argmax(-1))
        found["accuracy"].append((chosen == answers).float().cpu())
    return {name: torch.cat(parts) for name, parts in found.items()}


def compare(models: Models, probes: Mapping[str, list[Probe]]) -> dict[str, Any]:
    """Ask both models, and return accuracy and gain by distance."""
    show, done = Progress("recall", sum(map(len, probes.values()))), 0
    results: dict[str, Any] = {}
    for name, each in probes.items():
        rows = []
        for probe in each:
            rows += _by_distance(probe, {side: answered(models[side], probe) for side in SIDES})
            done += 1
            show(done, name)
        choices = each[0].choices
        results[name] = {"chance": None if choices is None else 1 / choices.shape[1], "sequences": SEQUENCES, "rows": rows}
    return results


def _by_distance(probe: Probe, found: Mapping[str, Mapping[str, Tensor]]) -> list[dict[str, Any]]:
    """Summarize by distance; one number per sequence, whose questions are not independent."""
    distance = (probe.places - probe.earlier).float().cpu()
    count = 1 if probe.distance is not None else GROUPS
    order = distance.flatten().argsort(stable=True).argsort().view(distance.shape)
    rows = []
    for group in range(count):
        inside = (order * count // distance.numel() == group).float()
        has = inside.sum(1) > 0
        of = {
            side: {name: ((x * inside).sum(1) / inside.sum(1).clamp_min(1))[has] for name, x in found[side].items()}
            for side in SIDES
        }
        rows.append(
            {
                "distance": probe.distance or round(distance[inside.bool()].mean().item()),
                "questions": int(inside.sum()),
                "accuracy": {
                    **{side: proportion_interval(of[side]["accuracy"]) for side in SIDES},
                    "difference": bounded_interval(of["converted"]["accuracy"] - of["original"]["accuracy"], -1.0),
                },
                "gain": {
                    **{side: mean_interval(of[side]["gain"]) for side in SIDES},
                    "difference": mean_interval(of["converted"]["gain"] - of["original"]["gain"]),
                },
            }
        )
    return rows


def probes(tokenizer: Any, ids: Tensor, positions: int | None) -> dict[str, list[Probe]]:
    """Build the sequences of every kind of recall from words of the held-out text, (pieces, tokens)."""
    longest = max(ids.shape[1], LONGEST if positions is None else min(positions, LONGEST))
    words = single_words(tokenizer, ids)
    start = torch.tensor([] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id], dtype=torch.long)
    draw = torch.Generator().manual_seed(SEED)
    text, room = ids.cpu().flatten(), longest - len(start)
    pairs = min(PAIRS, len(words) // 2, room // 5)
    copied, paired = distances(NEAREST, room // 2), distances(2 * pairs, room - 2 * pairs)
    found = {
        "text": [copying(_pieces(text, distance, draw), start) for distance in copied],
        "words": [copying(_words(words, distance, draw), start) for distance in copied],
        "associative": [associating(words, start, text, distance, pairs, draw) for distance in paired],
        "retrieval": [retrieving(words, start, *_separators(tokenizer), room, draw)],
    }
    return {name: [probe.on(ids.device) for probe in each] for name, each in found.items()}


def distances(nearest: int, farthest: int) -> list[int]:
    """Return doublings of the nearest distance, and the farthest if it is not close to the last of them.

    >>> distances(8, 127), distances(16, 20)
    ([8, 16, 32, 64, 127], [16])
    """
    found = [nearest]
    while 2 * found[-1] <= farthest:
        found.append(2 * found[-1])
    return [*found, farthest] if farthest > 1.3 * found[-1] else found


def single_words(tokenizer: Any, ids: Tensor) -> Tensor:
    """Return tokens of the text that are words of their own; other tokens where the tokenizer has too few of them."""
    special = set(tokenizer.all_special_ids)
    seen = [token for token in sorted(set(ids.flatten().tolist())) if token not in special]
    names = tokenizer.convert_ids_to_tokens(seen)
    words = [
        token
        for token, name in zip(seen, names, strict=True)
        if name[:1] in ("\u2581", "\u0120") and name[1:].isalpha() and len(name) > 3
    ]
    few = 4 * PAIRS
    return torch.tensor(words if len(words) >= few else seen)


def _words(words: Tensor, distance: int, draw: torch.Generator) -> Tensor:
    return words[torch.randint(len(words), (max(SEQUENCES, COPIED // distance), distance), generator=draw)]


def _pieces(text: Tensor, tokens: int, draw: torch.Generator) -> Tensor:
    begins = torch.randint(max(1, len(text) - tokens), (max(SEQUENCES, COPIED // max(1, tokens)), 1), generator=draw)
    return text[(begins + torch.arange(tokens)) % len(text)]


def copying(once: Tensor, start: Tensor) -> Probe:
    """Repeat sequences once; all of the second copy but its first token can be known."""
    count, distance = once.shape
    earlier = (len(start) + torch.arange(distance - 1)).expand(count, -1)
    return _probe(start, [once, once], earlier + distance, earlier, distance=distance)


def associating(words: Tensor, start: Tensor, text: Tensor, distance: int, pairs: int, draw: torch.Generator) -> Probe:
    """Show pairs, then ordinary text, then ask for the second of every pair by the first, in another order."""
    drawn = _drawn(words, SEQUENCES, 2 * pairs, draw).view(SEQUENCES, pairs, 2)
    order = torch.stack([torch.randperm(pairs, generator=draw) for _ in range(SEQUENCES)])
    again = drawn.gather(1, order[..., None].expand(-1, -1, 2))
    between = _pieces(text, distance - 2 * pairs, draw)[:SEQUENCES]
    places = (len(start) + distance + 2 * torch.arange(pairs)).expand(SEQUENCES, -1)
    parts = [drawn.flatten(1), between, again.flatten(1)]
    return _probe(start, parts, places, len(start) + 2 * order, choices=drawn[..., 1], distance=distance)


def retrieving(words: Tensor, start: Tensor, colon: Tensor, end: Tensor, room: int, draw: torch.Generator) -> Probe:
    """Fill the context with lines of a key and a value, then ask for the values of some of the keys, from all distances."""
    size = 2 + len(colon) + len(end)
    questions = max(1, min(QUESTIONS, room // size // 4))
    lines = max(2, min(room // size - questions, len(words) // 2))
    questions = min(questions, lines)  # of a text with few words
    drawn = _drawn(words, SEQUENCES, 2 * lines, draw).view(SEQUENCES, lines, 2)
    asked = torch.stack([torch.randperm(lines, generator=draw)[:questions] for _ in range(SEQUENCES)])
    again = drawn.gather(1, asked[..., None].expand(-1, -1, 2))
    both = torch.cat([drawn, again], dim=1)
    count = (SEQUENCES, lines + questions)
    parts = (both[..., :1], colon.expand(*count, -1), both[..., 1:], end.expand(*count, -1))
    places, earlier = (len(start) + at * size + len(colon) for at in (lines + torch.arange(questions), asked))
    return _probe(start, [torch.cat(parts, dim=-1).flatten(1)], places.expand(SEQUENCES, -1), earlier, choices=drawn[..., 1])


def _probe(start: Tensor, parts: list[Tensor], places: Tensor, earlier: Tensor, **others: Any) -> Probe:
    return Probe(ids=torch.cat([start.expand(len(places), -1), *parts], dim=1), places=places, earlier=earlier, **others)


def _drawn(words: Tensor, sequences: int, count: int, draw: torch.Generator) -> Tensor:
    """Draw different words for every sequence."""
    return torch.stack([words[torch.randperm(len(words), generator=draw)[:count]] for _ in range(sequences)])


def _separators(tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Return the tokens of a colon and of the end of a line, after a word."""
    word, *ended = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a", "a:", "a\n"))
    return tuple(torch.tensor(ids[len(word) :], dtype=torch.long) for ids in ended)  # type: ignore[return-value]
