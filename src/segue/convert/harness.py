"""Multiple choice by lm-evaluation-harness: its tasks and prompts, with every option in every place."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from segue.convert.compare import SIDES, Models
from segue.data.files import without_network
from segue.errors import ConfigError, MissingExtraError
from segue.reporting.statistics import bounded_interval, proportion_interval
from segue.training.progress import Progress

QUESTIONS = 128  # of a task, at most
AT_ONCE = 8  # options that a model reads

Document = dict[str, Any]


def load(name: str, *, download: bool) -> dict[str, Any]:
    """Load a task, or all tasks of a group, by its name in the harness or from a YAML file; only multiple choice."""
    fault = f"the task {name!r} cannot be asked."
    try:
        from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError(fault, f"lm-evaluation-harness cannot be imported: {error}.", "pip install lm_eval") from error
    try:
        with nullcontext() if download else without_network():
            known = not Path(name).is_file()  # reading the list of all tasks takes seconds
            tasks: dict[str, Any] = TaskManager(include_defaults=known).load([name])["tasks"]
    except Exception as error:  # of the harness, of `datasets`, or of code in a task
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = "`lm_eval ls tasks` lists the names; a task's data may need --download."
        raise ConfigError(fault, f"{type(error).__name__}: {reason}", hint) from error
    others = [each for each, task in tasks.items() if task.OUTPUT_TYPE != "multiple_choice" or task.multiple_input]
    if others or not tasks:
        found = f"{others[0]} is not multiple choice." if others else "It is empty."
        raise ConfigError(fault, found, "give a task whose options are compared, such as mmlu or arc_easy.")
    return tasks


def compare(models: Models, tokenizer: Any, tasks: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Ask both models the questions of every task; the unit of an interval is a question, over all orders of its options."""
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-untyped]

    plain, marked = (tokenizer("a", add_special_tokens=marks)["input_ids"] for marks in (False, True))
    marks = {"add_bos_token": False} if marked[-1] != plain[-1] else {}  # an end mark would stand between prompt and option
    readers = {side: HFLM(pretrained=models[side], tokenizer=tokenizer, batch_size=AT_ONCE, **marks) for side in SIDES}
    rows = []
    for name, task in tasks.items():
        asked = [orders(task, dict(document)) for document in islice(task.eval_docs, QUESTIONS)]
        right = _answered(readers, task, asked, name)
        accuracy = {side: torch.stack([each.mean() for each in right[side]]) for side in SIDES}
        rows.append(
            {
                "task": name,
                "questions": len(asked),
                "orders": max(map(len, asked)),
                "accuracy": {side: proportion_interval(accuracy[side]) for side in SIDES},
                "difference": bounded_interval(accuracy["converted"] - accuracy["original"], -1.0),
                "in_every_order": {
                    side: proportion_interval(torch.stack([each.min() for each in right[side]])) for side in SIDES
                },
                "chance": sum(1 / len(task.doc_to_choice(each[0])) for each in asked) / len(asked),
            }
        )
    return rows


def _answered(readers: Mapping[str, Any], task: Any, asked: list[list[Document]], name: str) -> dict[str, list[Tensor]]:
    """Return for every question, 1 or 0 for every order of its options."""
    right: dict[str, list[Tensor]] = {side: [] for side in readers}
    show = Progress(name, len(asked))
    for done, documents in enumerate(asked, start=1):
        requests = [_requests(task, document) for document in documents]
        for side, reader in readers.items():
            flat = reader.loglikelihood([request for each in requests for request in each], disable_tqdm=True)
            likely = iter([log for log, _ in flat])
            best = [max(range(len(each)), key=[next(likely) for _ in each].__getitem__) for each in requests]
            hits = [chosen == _target(task, document) for chosen, document in zip(best, documents, strict=True)]
            right[side].append(torch.tensor(hits, dtype=torch.float32))
        show(done)
    return right


def orders(task: Any, document: Document) -> list[Document]:
    """Return a question with its options turned until each was in each place, where the prompt shows them; else as it is."""
    target, count = _target(task, document), len(task.doc_to_choice(document))
    found = [document]
    for turn in range(1, count):
        turned, expected = _turned(document, turn, count), (target - turn) % count
        if _target(task, turned) != expected:  # the answer is a field of its own, as a number or a letter
            answers = {target: expected, chr(65 + target): chr(65 + expected)}
            plain = {
                key: value for key, value in turned.items() if isinstance(value, int | str) and not isinstance(value, bool)
            }
            turned |= {key: answers[value] for key, value in plain.items() if value in answers}
        if _target(task, turned) != expected or task.doc_to_text(turned) == task.doc_to_text(document):
            return [document]
        found.append(turned)
    return found


def _turned(document: Document, turn: int, count: int) -> Document:
    """Turn every list that has as many items as there are options."""

    def turned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: turned(each) for key, each in value.items()}
        return value[turn:] + value[:turn] if isinstance(value, list) and len(value) == count else value

    return {key: turned(value) for key, value in document.items()}


def _target(task: Any, document: Document) -> int:
    target = task.doc_to_target(document)
    return target if isinstance(target, int) else task.doc_to_choice(document).index(target)


def _requests(task: Any, document: Document) -> list[Any]:
    context = task.fewshot_context(document, task.config.num_fewshot or 0)
    requests: list[Any] = task.construct_requests(document, context, metadata=(task.task_name, 0, 1))
    return requests[: len(task.doc_to_choice(document))]
