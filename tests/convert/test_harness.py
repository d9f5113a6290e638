"""Multiple choice by lm-evaluation-harness, from a local file: every option is in every place, and the answers are right."""

import json
from itertools import pairwise

import pytest
import torch

from segue.convert import findings, harness
from segue.errors import ConfigError
from tests.convert.small_models import model, tokenizer

pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the harness and what it imports

LETTERS = """
doc_to_text: "{{question}}\\nA. {{choices[0]}}\\nB. {{choices[1]}}\\nC. {{choices[2]}}\\nAnswer:"
doc_to_choice: ["A", "B", "C"]
doc_to_target: answer
"""
CONTINUED = """
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
"""
WORDS = ("one", "two", "three", "four", "five", "six")


@pytest.fixture
def write(tmp_path):
    def made(how: str, kind: str = "multiple_choice") -> str:
        rows = [
            {"question": f"{a} then", "choices": [b, a, "ten"], "answer": i % 3} for i, (a, b) in enumerate(pairwise(WORDS))
        ]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / "counting.yaml").write_text(
            f"task: counting\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path / 'rows.jsonl'}\n"
            f"test_split: test\noutput_type: {kind}\nmetric_list:\n  - metric: acc\n{how}"
        )
        return str(tmp_path / "counting.yaml")

    return made


def test_every_option_is_in_every_place_and_the_answer_moves_with_it(write):
    task = harness.load(write(LETTERS), download=False)["counting"]
    for document in map(dict, task.eval_docs):
        found = harness.orders(task, document)
        assert len(found) == 3
        assert {each["choices"][each["answer"]] for each in found} == {document["choices"][document["answer"]]}
        assert [each["choices"][0] for each in found] == document["choices"]
        assert len({task.doc_to_text(each) for each in found}) == 3


def test_options_that_the_prompt_does_not_show_are_not_turned(write):
    task = harness.load(write(CONTINUED), download=False)["counting"]
    assert all(len(harness.orders(task, dict(document))) == 1 for document in task.eval_docs)


@torch.no_grad()
def test_accuracy_is_that_of_a_naive_loop(write, results):
    tasks = harness.load(write(LETTERS), download=False)
    models, reads = {"original": model("llama", 0), "converted": model("llama", 1)}, tokenizer()
    (found,) = harness.compare(models, reads, tasks)
    task = tasks["counting"]
    for side, each in models.items():
        by_question = []
        for document in map(dict, task.eval_docs):
            right = []
            for turned in harness.orders(task, document):
                prompt = reads(task.doc_to_text(turned), add_special_tokens=False)["input_ids"]
                logs = []
                for letter in "ABC":
                    ids = reads(f"{task.doc_to_text(turned)} {letter}", add_special_tokens=False)["input_ids"]
                    log = each(input_ids=torch.tensor([ids])).logits.log_softmax(-1)
                    logs.append(sum(log[0, i - 1, ids[i]].item() for i in range(len(prompt), len(ids))))
                right.append(logs.index(max(logs)) == turned["answer"])
            by_question.append(sum(right) / 3)
        assert found["accuracy"][side]["mean"] == pytest.approx(sum(by_question) / len(by_question), abs=1e-6)
        assert found["in_every_order"][side]["mean"] == pytest.approx(sum(x == 1 for x in by_question) / len(by_question))
    assert (found["questions"], found["orders"], found["chance"]) == (5, 3, pytest.approx(1 / 3))
    told = [row.what for row in findings.rows({**results, "harness": [found]})]
    assert {"counting, 3 orders", "counting, right in every order"} <= set(told)


def test_other_tasks_are_refused(write):
    with pytest.raises(ConfigError, match="is not multiple choice"):
        harness.load(write(CONTINUED, "generate_until"), download=False)
    with pytest.raises(ConfigError, match="the task 'no_such_task' cannot be asked") as caught:
        harness.load("no_such_task", download=False)
    assert len(str(caught.value).splitlines()) == 3
