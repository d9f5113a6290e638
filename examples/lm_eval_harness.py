"""Evaluate a converted model with EleutherAI's lm-evaluation-harness: its HFLM takes the model object.

Run: python examples/lm_eval_harness.py --steps 150     # makes and converts a tiny Llama first; no network
     python examples/lm_eval_harness.py --folder DIR    # a model that `segue convert` wrote
"""

import argparse
import random

import datasets
import lm_eval
import torch
import transformers
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM

import segue

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def questions(**settings) -> dict[str, datasets.Dataset]:
    """Ask what comes after two numbers, forwards and backwards."""
    runs = [order[i : i + 3] for order in (NUMBERS, NUMBERS[::-1]) for i in range(8)]
    rows = [{"question": f"{a} {b}", "answer": NUMBERS.index(c)} for a, b, c in runs]
    return {"test": datasets.Dataset.from_list(rows)}


def accuracy(model, tokenizer, **settings) -> float:
    """Let the harness ask all questions; its own tasks are called by name: lm_eval.simple_evaluate(lm, tasks=[...])."""
    lm = HFLM(pretrained=model.eval(), tokenizer=tokenizer, batch_size=8, **settings)
    data = {"task": "counting", "custom_dataset": questions, "test_split": "test", "output_type": "multiple_choice"}
    asked = {"doc_to_text": "{{question}}", "doc_to_choice": NUMBERS, "doc_to_target": "answer"}
    task = ConfigurableTask(config={**data, **asked, "metric_list": [{"metric": "acc"}]})
    return lm_eval.evaluate(lm, {"counting": task}, bootstrap_iters=0)["results"]["counting"]["acc,none"]


def train(model, tokenizer, parameters, steps: int, handover=None) -> None:
    optimizer, generator = torch.optim.AdamW(parameters, lr=3e-3), random.Random(0)
    for _ in range(steps):
        starts = [(generator.choice((NUMBERS, NUMBERS[::-1])), generator.randrange(6)) for _ in range(16)]
        texts = [" ".join(order[begin : begin + 5]).ljust(25) for order, begin in starts]
        ids = tokenizer(texts, add_special_tokens=False, return_tensors="pt").input_ids
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        if handover is not None:
            loss = loss + handover.aux_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if handover is not None:
            handover.step()


def main(steps: int, folder: str | None) -> None:
    if folder is not None:
        model, tokenizer = segue.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)
        print(f"accuracy {accuracy(model, tokenizer):.3f}")
        return
    torch.manual_seed(0)
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)  # bytes: nothing to download
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), bos_token_id=None, **SIZES))
    train(model, tokenizer, model.parameters(), 2 * steps)
    print(f"accuracy of the original {accuracy(model, tokenizer, add_bos_token=False):.3f}")  # False: no end mark either

    plan = segue.methods.dcr_dfg(sites="**.self_attn", student=segue.students.WindowedLinear(window=8))
    handover = segue.replace_(model.train(), plan, total_steps=steps)
    train(model, tokenizer, list(handover.parameters()), steps, handover)
    handover.finalize_()
    print(f"accuracy of the converted model {accuracy(model, tokenizer, add_bos_token=False):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--folder")
    main(**vars(parser.parse_args()))
