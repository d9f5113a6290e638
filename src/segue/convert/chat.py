"""Chats: rows of messages in the model's own format, with a loss on the replies alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from segue.convert.pretrained import Base
from segue.convert.tasks import IGNORED
from segue.convert.texts import TEXT
from segue.errors import DataError

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template that says itself which parts the assistant writes
Message = Mapping[str, Any]


def is_chat(row: object) -> bool:
    """Return whether a row holds a chat: `messages`, or a `prompt` and its `completion`, and no plain text."""
    return isinstance(row, dict) and not any(name in row for name in TEXT) and _kind(row) is not None


@dataclass(frozen=True)
class Chats:
    """Encoded chats."""

    examples: list[tuple[Tensor, Tensor]]  # tokens, and labels: the same where a reply is, IGNORED elsewhere
    padding: int
    detail: str

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, chosen: Tensor) -> dict[str, Tensor]:
        """Return some chats, padded at their ends to the longest of them."""
        ids, labels = (list(each) for each in zip(*(self.examples[i] for i in chosen.tolist()), strict=True))
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.padding),
            "attention_mask": pad_sequence([torch.ones_like(each) for each in ids], batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        }


def encoded(base: Base, rows: Iterable[Any], source: str, longest: int) -> Chats:
    """Format every row by the model's chat template and find its replies; what is beyond the longest length is cut off."""
    reader, examples, without = _Reader(base, source), [], 0
    for number, row in enumerate(rows, start=1):
        reader.number = number
        ids, counts = (torch.tensor(each[:longest]) for each in reader.read(row))
        if not counts[1:].any():  # nothing predicts the first token
            without += 1
            continue
        examples.append((ids, ids.masked_fill(~counts, IGNORED)))
    if not examples:
        found = f"In {without} of {without} rows no reply begins within {longest} tokens."
        raise DataError(f"{source} has no replies to train on.", found, "give more --tokens, or rows with replies.")
    tokenizer = base.processor
    padding = next((each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id) if each is not None), 0)
    replies = sum(int((labels != IGNORED).sum()) for _, labels in examples)
    omitted = f", {without:,} rows without a reply left out" if without else ""
    detail = f" of at most {longest} tokens, {replies:,} of them in replies{omitted}"
    return Chats(examples, padding, detail)


class _Reader:
    """Read rows one by one."""

    def __init__(self, base: Base, source: str) -> None:
        self.tokenizer, self.name, self.source = base.processor, base.name, source
        self.number = 0

    def read(self, row: Any) -> tuple[list[int], list[bool]]:
        """Return the tokens of a row, and which of them are replies."""
        kind = _kind(row) if isinstance(row, dict) else None
        if kind is None:
            found = f"columns {', '.join(map(repr, row))}" if isinstance(row, dict) else f"a {type(row).__name__}"
            raise self._refused(f"It has {found}.", "every row needs `messages`, or a `prompt` and its `completion`.")
        if kind == "messages":
            return self._chat(self._messages(row["messages"]), 0)
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return self._plain(prompt, completion)
        before = self._messages(prompt)
        return self._chat([*before, *self._messages(completion)], len(before))

    def _messages(self, value: Any) -> Sequence[Message]:
        if (
            isinstance(value, list)
            and value
            and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in value)
        ):
            return value
        hint = 'a chat is a list such as [{"role": "user", "content": "..."}].'
        raise self._refused(f"Its messages are {value!r:.60}.", hint)

    def _plain(self, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
        begin, end = ([] if each is None else [each] for each in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id))
        before, both = (begin + self._tokens(text) for text in (prompt, prompt + completion))
        first = _common(before, both)
        both += end
        return both, [place >= first for place in range(len(both))]

    def _chat(self, messages: Sequence[Message], first: int) -> tuple[list[int], list[bool]]:
        """Format messages; replies are those of the assistant from the first of `completion` on."""
        if MARKED.search(self._template()) and self.tokenizer.is_fast and first == 0:
            found = self._format(messages, return_dict=True, return_assistant_tokens_mask=True)
            return found["input_ids"], [bool(each) for each in found["assistant_masks"]]
        text = self._format(messages, tokenize=False)
        ids = self._tokens(text)
        counts = [False] * len(ids)
        for place, message in enumerate(messages):
            if message["role"] == "assistant" and place >= first:
                begin, end = (
                    self._prefix(messages[:place], text, ids, True),
                    self._prefix(messages[: place + 1], text, ids, False),
                )
                counts[begin:end] = [True] * (end - begin)
        return ids, counts

    def _prefix(self, messages: Sequence[Message], text: str, ids: list[int], prompts: bool) -> int:
        """Return how many tokens of a chat its first messages take; a token that reaches beyond them is not theirs."""
        prefix = self._format(messages, tokenize=False, add_generation_prompt=prompts) if messages else ""
        if not text.startswith(prefix):
            found = f"Its first {len(messages)} messages are formatted in another way than as part of the chat."
            hint = "mark replies in the template by {% generation %}, or give rows with one reply each."
            raise self._refused(found, hint)
        return len(ids) if prefix == text else _common(self._tokens(prefix), ids)

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _template(self) -> str:
        try:
            return str(self.tokenizer.get_chat_template())
        except ValueError:
            raise DataError(
                f"the chats in {self.source!r} cannot be formatted.",
                f"The tokenizer of {self.name} has no chat template.",
                "give a model for chats, or rows whose `prompt` and `completion` are plain text.",
            ) from None

    def _format(self, messages: Sequence[Message], **how: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(list(messages), **how)
        except Exception as error:  # of the template's own checks
            found = f"Its chat template raises {type(error).__name__}: {error}."
            raise self._refused(found, "give messages that the model's template takes.") from error

    def _refused(self, found: str, hint: str) -> DataError:
        return DataError(f"row {self.number} of {self.source!r} is no chat for {self.name}.", found, hint)


def _kind(row: Mapping[str, Any]) -> str | None:
    if "messages" in row:
        return "messages"
    return "completion" if "prompt" in row and "completion" in row else None


def _common(a: list[int], b: list[int]) -> int:
    """Return how many tokens two texts begin with in common."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))
