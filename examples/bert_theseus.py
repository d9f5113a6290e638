"""BERT-of-Theseus: six layers become three while the model works.

A digit of 4 x 4 grey squares is read as a sentence of 16 words, 0 to 16; BERT says which digit it is.

Run: python examples/bert_theseus.py --steps 300
"""

import argparse

import torch
import transformers
from small_vit import batches, digits
from torch.nn import functional as F

import segue


def sentences(images, labels):
    return (F.avg_pool2d(images, 2).flatten(1) * 16).round().long(), labels


def bert() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=17, hidden_size=48, num_hidden_layers=6, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=16, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).train()


def accuracy(model, words, labels) -> float:
    with torch.no_grad():
        return (model.eval()(words).logits.argmax(-1) == labels).float().mean().item()


def train(model, parameters, data, steps: int, handover: segue.Handover | None = None) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for words, labels in batches(*data, steps, seed=1):
        model(words, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if handover is not None:
            handover.step()


def main(steps: int) -> None:
    training, test = (sentences(*part) for part in digits())
    model = bert()
    train(model, model.parameters(), training, steps)
    print(f"accuracy of six layers {accuracy(model, *test):.3f}")

    plan = segue.methods.theseus(
        sites=segue.Span("bert.encoder.layer", every=2),  # each pair of layers is one site
        student=segue.students.OneLayer(),  # the first of the two, with its weights; Reinit() begins with fresh ones
        schedule=segue.schedules.Linear(start=0.5, until=0.5),  # the old pair's probability; then the new layers train alone
        train="all",
    )
    handover = segue.replace_(model.train(), plan, total_steps=steps)
    train(model, handover.parameters(), training, steps, handover)
    handover.finalize_()

    print(f"accuracy of {model.config.num_hidden_layers} layers {accuracy(model, *test):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
