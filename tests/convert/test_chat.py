"""Chats: the model's own format, a loss on replies alone, and masks that an independent reading of the text agrees with."""

from __future__ import annotations

import json
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch.nn import functional as F
from transformers import ByT5Tokenizer

import segue
from segue.convert import chat, data
from segue.convert.pretrained import open_base
from segue.convert.tasks import IGNORED, NextToken
from segue.errors import DataError
from segue.losses import FeatureGuidance, LogitDistillation
from segue.schedules import Constant
from tests.convert.small_models import epoch, save, scores, settings, tokenizer

CHATML = (
    "{% for message in messages %}<{{ message['role'][0] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
MARKED = (
    "{% for message in messages %}<{{ message['role'][0] }}>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<end>{% endgeneration %}{% else %}{{ message['content'] }}<end>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
ONLY_LAST = "{% for message in messages[-2:] %}<{{ message['role'][0] }}>{{ message['content'] }}{% endfor %}"  # forgets
ROWS = [
    [("user", "one two"), ("assistant", "three four")],
    [("system", "count"), ("user", "five"), ("assistant", "six"), ("user", "seven eight"), ("assistant", "nine")],
    [("user", "ten"), ("assistant", "eleven twelve one")],
    [("user", "two"), ("assistant", "three")],
]


def messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def reply_text(turns: list[tuple[str, str]]) -> str:
    return "".join(f"{content}<end>" for role, content in turns if role == "assistant")


def chat_text(turns: list[tuple[str, str]]) -> str:
    return "".join(f"<{role[0]}>{content}<end>" for role, content in turns)


@pytest.fixture
def folder(tmp_path):
    def made(template: str | None, reader: Any = None) -> Any:
        place = save("llama", tmp_path / f"model{len(list(tmp_path.iterdir()))}")
        reader = tokenizer() if reader is None else reader
        if template is not None:
            reader.chat_template = template
        reader.save_pretrained(place)
        return open_base(str(place))

    return made


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"id": 1, "messages": messages(turns)}) for turns in ROWS))
    return path


def by_row(found: data.Data) -> list[dict[str, torch.Tensor]]:
    batches = [*epoch(found), *found.held_out]
    return [{name: x[i] for name, x in batch.items()} for batch in batches for i in range(len(batch["input_ids"]))]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_only_the_assistants_tokens_have_a_label(template, folder, source):
    base = folder(template)
    found = data.load(base, settings(source, batch=3, tokens=64, validation=0.25))
    rows = by_row(found)
    wanted = sorted(map(reply_text, ROWS))
    read = base.processor.decode
    assert sorted(read(row["labels"][row["labels"] != IGNORED]) for row in rows) == wanted
    whole = sorted(map(chat_text, ROWS))
    assert sorted(read(row["input_ids"][row["attention_mask"] == 1]) for row in rows) == whole
    for row in rows:
        assert (row["labels"][row["attention_mask"] == 0] == IGNORED).all()
        assert torch.equal(row["labels"][row["labels"] != IGNORED], row["input_ids"][row["labels"] != IGNORED])
    replies = sum(int((row["labels"] != IGNORED).sum()) for row in rows)
    assert found.train_size == f"3 chats of at most 64 tokens, {replies:,} of them in replies"
    assert found.held_out_size == "1 chats"


def test_a_tokenizer_without_offsets_finds_the_same_replies(folder, source):
    """Transformers' own mask of replies needs offsets; prefixes do not."""
    base = folder(MARKED, ByT5Tokenizer())
    base.model.config.max_position_embeddings = 512
    found = data.load(base, settings(source, batch=3, tokens=200, validation=0.25))
    texts = sorted(base.processor.decode(row["labels"][row["labels"] != IGNORED]) for row in by_row(found))
    assert texts == sorted(map(reply_text, ROWS))


def test_every_form_of_rows_gives_the_same_chats(folder, source, tmp_path):
    rows = [{"messages": messages(turns)} for turns in ROWS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "dataset")
    split = [{"prompt": messages(turns[:-1]), "completion": messages(turns[-1:])} for turns in ROWS]
    (tmp_path / "split.jsonl").write_text("\n".join(map(json.dumps, split)))
    base, known = folder(CHATML), settings(source, batch=4, tokens=64, validation=str(source))
    (wanted,) = data.load(base, known).held_out
    for name in ("a.parquet", "dataset", "split.jsonl"):
        (found,) = data.load(base, settings(source, batch=4, tokens=64, validation=str(tmp_path / name))).held_out
        assert torch.equal(found["input_ids"], wanted["input_ids"]), name
        if name != "split.jsonl":
            assert torch.equal(found["labels"], wanted["labels"]), name
    assert base.processor.decode(found["labels"][1][found["labels"][1] != IGNORED]) == "nine<end>"  # not the reply before it


def test_plain_prompts_need_no_template(folder, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"prompt": "one", "completion": " two three"}) for _ in range(4)))
    base = folder(None)
    found = data.load(base, settings(tmp_path / "a.jsonl", tokens=32, validation=0.25))
    for row in by_row(found):
        assert base.processor.decode(row["input_ids"][row["attention_mask"] == 1]) == "one two three<end>"
        assert base.processor.decode(row["labels"][row["labels"] != IGNORED]) == " two three<end>"
    (across,) = chat.encoded(base, [{"prompt": "one ", "completion": "two"}], "", 32).examples
    assert base.processor.decode(across[1][across[1] != IGNORED]) == " two<end>"  # one token of both belongs to the reply


def test_a_text_column_is_still_a_text(folder, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": "one two " * 20, "messages": []}) for _ in range(4)))
    assert "labels" not in epoch(data.load(folder(CHATML), settings(tmp_path / "a.jsonl")))[0]


def test_the_loss_is_transformers_own_and_scores_are_the_mean_over_replies(folder, source):
    base = folder(CHATML)
    found = data.load(base, settings(source, batch=4, tokens=64, validation=str(source)))
    (batch,) = found.held_out
    task = NextToken()
    with torch.no_grad():
        theirs = base.model(**batch).loss
        assert task(base.model, batch).item() == pytest.approx(theirs.item(), rel=1e-5)
        one_by_one = [base.model(**{name: x[i : i + 1] for name, x in batch.items()}).loss.item() for i in range(4)]
    assert scores(base, found)["loss"] == pytest.approx(sum(one_by_one) / 4, rel=1e-5)


def test_a_validation_file_of_texts_beside_chats_is_scored_on_all_its_tokens(folder, source, texts):
    base = folder(CHATML)
    found = data.load(base, settings(source, batch=4, tokens=32, validation=str(texts), evaluate_on=(str(source),)))
    assert "labels" not in next(iter(found.held_out))
    assert scores(base, found)["loss"] > 0
    assert "labels" in next(iter(found.evaluated_on[str(source)]))


def test_distillation_is_on_replies_and_guidance_on_all_but_padding(folder, source):
    base = folder(CHATML)
    (batch,) = data.load(base, settings(source, batch=4, tokens=64, validation=str(source))).held_out
    model, task = base.model, NextToken()
    distill, guidance = LogitDistillation(temperature=1.0), FeatureGuidance(schedule=Constant(alpha=1.0))
    plan = segue.Plan(
        sites="model.layers.*.mlp",
        student=segue.students.Reinit(),
        schedule=Constant(alpha=0.0),
        distill=distill,
        guidance=guidance,
    )
    with torch.no_grad():
        teacher = model(**batch).logits.log_softmax(-1)
    handover = segue.replace_(model, plan, total_steps=2)
    model.train()
    student = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits.log_softmax(
        -1
    )
    parts = handover.losses(batch["attention_mask"], output_mask=task.output_mask(batch))
    kl = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    rows = []
    for row, labels in zip(kl, batch["labels"], strict=True):
        counted = [row[t] for t in range(len(labels) - 1) if labels[t + 1] != IGNORED]  # position t predicts token t + 1
        rows.append(torch.stack(counted).mean())
    assert parts["distill"].item() == pytest.approx(torch.stack(rows).mean().item(), rel=1e-5)
    model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    of_all = handover.losses(batch["attention_mask"])
    assert of_all["distill"].item() != pytest.approx(parts["distill"].item(), rel=1e-3)
    name = "guidance/model.layers.0.mlp"
    assert of_all[name].item() == pytest.approx(parts[name].item(), rel=1e-6)


def test_fit_gives_distillation_the_mask_of_the_task(folder, source):
    """What is padded or in a prompt may be anything: the students learn the same."""
    states = []
    for noise in (0, 7):
        base = folder(CHATML)
        batch = {
            name: x.clone()
            for name, x in next(
                iter(data.load(base, settings(source, batch=4, tokens=64, validation=str(source))).held_out)
            ).items()
        }
        batch["input_ids"][batch["attention_mask"] == 0] = noise
        plan = segue.methods.distillation(sites="model.layers.*.mlp", student=segue.students.Reinit())
        segue.fit(base.model, plan, [batch], NextToken(), recipe=segue.Recipe(steps=2, lr=1e-2), progress=None)
        states.append(torch.cat([p.detach().flatten() for p in base.model.parameters()]))
    assert torch.allclose(*states, atol=1e-6)


@pytest.mark.parametrize(
    ("template", "rows", "wrong", "found"),
    [
        (None, [{"messages": messages(ROWS[0])}], "the chats in", "has no chat template"),
        (ONLY_LAST, [{"messages": messages(ROWS[1])}], "row 1 of", "are formatted in another way than as part of the chat"),
        (CHATML, [{"messages": "hello"}], "row 1 of", "Its messages are 'hello'."),
        (CHATML, [{"messages": messages(ROWS[0])}, {"other": 1}], "row 2 of", "It has columns 'other'."),
        ("{{ raise_exception('no system') }}", [{"messages": messages(ROWS[1])}], "row 1 of", "TemplateError: no system."),
        (CHATML, [{"messages": messages(ROWS[0][:1])}], "has no replies to train on", "In 1 of 1 rows no reply begins"),
    ],
)
def test_what_is_no_chat_gets_three_lines(template, rows, wrong, found, folder, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError) as caught:
        data.load(folder(template), settings(tmp_path / "a.jsonl", tokens=64))
    assert wrong in str(caught.value).splitlines()[0]
    assert found in str(caught.value).splitlines()[1]
    assert len(str(caught.value).splitlines()) == 3


def test_long_chats_are_cut_and_those_without_a_reply_are_left_out(folder, tmp_path):
    long = [("user", "one " * 40), ("assistant", "two")]
    rows = [{"messages": messages(turns)} for turns in (*ROWS, long, [("user", "two"), ("assistant", "three " * 40)])]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    base = folder(CHATML)
    chats = chat.encoded(base, rows, "a.jsonl", 40)
    assert len(chats) == len(ROWS) + 1
    assert max(len(ids) for ids, _ in chats.examples) == 40
    assert chats.detail.endswith("1 rows without a reply left out")
