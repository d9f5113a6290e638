"""Tasks: the same batches for every method, balanced shares, and held-out parts that stay held out."""

from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch.nn import functional as F

import segue
from segue.data import Crop, Digits, Tsv
from segue.errors import ConfigError
from segue.lab.models import SentenceClassifier, SmallViT
from segue.lab.tasks import ImageTask, SentenceTask
from segue.training.batches import Batches, InOrder
from segue.training.recipe import Recipe
from tests.helpers.tiny_runs import TASK


def indices(chosen, generator):
    return chosen.tolist()


def noisy(chosen, generator):
    return chosen.tolist(), torch.rand(2, generator=generator).tolist()


def epoch(batches, number):
    batches.set_epoch(number)
    return list(batches)


@pytest.mark.parametrize(("count", "size"), [(10, 3), (12, 4), (5, 5), (7, 1)])
def test_an_epoch_shows_every_example_once_but_for_what_fills_no_batch(count, size):
    batches = Batches(count, size, indices, seed=0)
    seen = epoch(batches, 0)
    assert len(seen) == len(batches) == count // size
    assert all(len(batch) == size for batch in seen)
    flat = [*chain(*seen)]
    assert len(set(flat)) == len(flat)
    assert set(flat) <= set(range(count))
    left_out = [set(range(count)) - {*chain(*epoch(batches, number))} for number in range(20)]
    assert count % size == 0 or len({*map(tuple, left_out)}) > 1  # not always the same


def test_fewer_examples_than_a_batch_are_one_batch():
    batches = Batches(3, 128, indices, seed=0)
    assert len(batches) == 1
    assert sorted(epoch(batches, 0)[0]) == [0, 1, 2]


def test_the_order_and_what_is_drawn_depend_on_seed_and_epoch_alone():
    first = Batches(20, 4, noisy, seed=1)
    wanted = {number: epoch(first, number) for number in (0, 1, 2)}
    torch.manual_seed(123)
    again = Batches(20, 4, noisy, seed=1)
    half = iter(again)
    next(half)  # a reader that stopped in the middle leaves nothing behind
    assert {number: epoch(again, number) for number in (2, 0, 1)} == {number: wanted[number] for number in (2, 0, 1)}
    assert wanted[0] != wanted[1] != wanted[2]
    assert epoch(Batches(20, 4, noisy, seed=2), 0) != wanted[0]


def test_batches_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    loaded = ImageTask(source=Digits(), model=SmallViT(depth=1), augment=Crop(pad=1)).load(share=0.1)
    list(loaded.train(16, 0))
    loaded.build(0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("count", "size"), [(10, 3), (9, 3), (1, 5), (0, 5)])
def test_held_out_batches_are_all_examples_in_order(count, size):
    batches = InOrder(count, size, lambda chosen: chosen.tolist())
    assert [*chain(*batches)] == list(range(count))
    assert len(list(batches)) == len(batches)
    assert list(batches) == list(batches)


# Shares


def labels_of(task, **settings):
    """Return the labels to train on, all of them, in the order of one epoch."""
    loaded = task.load(**settings)
    (batch,) = loaded.train(loaded.examples, 0)
    assert len(batch[1]) == loaded.examples
    return loaded, batch


@pytest.mark.parametrize("share", [1.0, 0.5, 0.2, 0.05, 0.001])
def test_a_share_of_the_data_is_the_same_share_of_every_class(share):
    whole = Counter(TASK.source().train.labels.tolist())
    _, (_, labels) = labels_of(TASK, share=share)
    found = Counter(labels.tolist())
    assert found == {label: max(1, round(share * count)) for label, count in whole.items()}


def test_shares_depend_on_the_seed_alone_and_their_order_is_not_sorted_by_class():
    images = {seed: labels_of(TASK, share=0.2, seed=seed)[1][0] for seed in (0, 1)}
    again = labels_of(TASK, share=0.2, seed=0)[1]
    assert torch.equal(again[0], images[0])
    assert not torch.equal(images[1], images[0])
    assert again[1].tolist() != sorted(again[1].tolist())
    once = {image.numpy().tobytes() for image in images[0]}
    assert len(once) > 0.95 * len(images[0])  # hardly any digit lies in the data twice


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ConfigError, match=f"share={share} of the data was asked for"):
        TASK.load(share=share)


def test_examples_held_out_to_choose_settings_by_are_never_trained_on():
    task = replace(TASK, hold_out=300, look=100)
    for seed in (0, 1):
        loaded, (images, _) = labels_of(task, seed=seed)
        assert loaded.examples == 1297 - 300
        held = torch.cat([batch[0] for batch in loaded.final])
        assert len(held) == 300
        known = TASK.source().train.inputs.unique(dim=0)
        train, judge = ({image.numpy().tobytes() for image in part} for part in (images, held))
        doubles = 1297 - len(known)
        assert len(train & judge) <= doubles
        look = torch.cat([batch[0] for batch in loaded.look])
        assert torch.equal(look, held[:100])
    test_part = torch.cat([batch[0] for batch in TASK.load().final])
    assert not any(torch.equal(held[0], image) for image in test_part)


@pytest.mark.parametrize("hold_out", [-1, 1297, 5000])
def test_nothing_left_to_train_on_is_refused(hold_out):
    with pytest.raises(ConfigError, match=f"hold_out={hold_out} examples were asked for") as caught:
        replace(TASK, hold_out=hold_out).load()
    assert "The training part has 1297." in str(caught.value)


def test_held_out_digits_are_the_test_part_normalised_as_the_training_part_is():
    data, loaded = TASK.source(), TASK.load()
    images, labels = (torch.cat(parts) for parts in zip(*loaded.final, strict=True))
    assert torch.equal(labels, data.test.labels)
    torch.testing.assert_close(images, (data.test.inputs / 255 - data.mean[0]) / data.std[0])
    look = torch.cat([batch[0] for batch in loaded.look])
    assert torch.equal(look, images[:100])
    whole = torch.cat([batch[0] for batch in loaded.train(1297, 0)])
    assert whole.mean().item() == pytest.approx(0.0, abs=1e-4)
    assert whole.std().item() == pytest.approx(1.0, abs=1e-3)


def test_a_pretrained_model_gets_pixels_in_the_scale_it_knows():
    plain = torch.cat([batch[0] for batch in TASK.load().final])
    data = TASK.source()
    loaded = replace(TASK, mean=(0.5,), std=(0.25,)).load()
    scaled = torch.cat([batch[0] for batch in loaded.final])
    torch.testing.assert_close(scaled, (data.test.inputs / 255 - 0.5) / 0.25)
    assert not torch.equal(scaled, plain)
    train = next(iter(loaded.train(1297, 0)))[0]
    assert train.min().item() == pytest.approx(-2.0)


def test_images_are_resized_and_augmented_only_where_they_train():
    task = ImageTask(source=Digits(), model=SmallViT(depth=1, patch=4), size=12, augment=Crop(pad=2))
    plain = replace(task, augment=TASK.augment)
    shifted, straight = next(iter(task.load().train(8, 0))), next(iter(plain.load().train(8, 0)))
    assert shifted[0].shape == straight[0].shape == (8, 1, 12, 12)
    assert torch.equal(shifted[1], straight[1])
    assert not torch.equal(shifted[0], straight[0])
    assert torch.equal(next(iter(task.load().final))[0], next(iter(plain.load().final))[0])
    assert task.load().build(0)(shifted[0]).shape == (8, 10)


def test_the_loss_has_the_tasks_label_smoothing_and_the_model_its_seed():
    loaded = TASK.load()
    model, (x, y) = loaded.build(3), next(iter(loaded.train(8, 0)))
    assert torch.equal(TASK.loss(model, (x, y)), F.cross_entropy(model(x), y, label_smoothing=0.1))
    same, other = loaded.build(3).state_dict(), loaded.build(4).state_dict()
    assert all(torch.equal(value, same[name]) for name, value in model.state_dict().items())
    assert not torch.equal(other["head.weight"], same["head.weight"])


def test_all_methods_of_a_seed_see_the_same_batches_in_the_same_order():
    """Recorded in the trainings themselves, over more than one epoch, with augmentation and a share of the data."""
    task = replace(TASK, augment=Crop(pad=1))

    def seen(method, seed):
        loaded = task.load(share=0.05, seed=seed)
        batches = []

        def loss(model, batch):
            batches.append(tuple(part.clone() for part in batch))
            return task.loss(model, batch)

        plan = segue.methods.ALL[method](sites=task.sites, seed=seed)
        segue.fit(
            loaded.build(0), plan, loaded.train(16, seed), loss, recipe=Recipe(steps=5, seed=seed), progress=None, evaluations=2
        )
        return batches

    first, *others = [seen(method, 0) for method in segue.methods.ALL]
    assert len(first) == 5
    for other in others:
        assert all(torch.equal(a, b) for one, two in zip(first, other, strict=True) for a, b in zip(one, two, strict=True))
    assert not torch.equal(seen("dcr", 1)[0][0], first[0][0])


# Sentences

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "very", "not"]


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """A one-block BERT with random weights, its tokenizer, and two files of sentences."""
    import transformers

    folder = tmp_path_factory.mktemp("sentences")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder / "model")
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    shape = transformers.BertConfig(vocab_size=len(WORDS), **size)
    transformers.BertForSequenceClassification(shape).save_pretrained(folder / "model")
    for name, count in (("train", 20), ("test", 7)):
        lines = [f"{'a very ' * (i % 3)}{'good' if i % 2 else 'bad'} film\t{i % 2}" for i in range(count)]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    return SentenceTask(
        source=Tsv(train=str(folder / "train.tsv"), test=str(folder / "test.tsv")),
        model=SentenceClassifier(name=str(folder / "model")),
        longest=6,
        look=5,
    )


def test_sentences_become_padded_batches_with_labels(sentences):
    loaded = sentences.load(share=0.5)
    batch = next(iter(loaded.train(4, 0)))
    assert loaded.examples == 10
    assert set(batch) >= {"input_ids", "attention_mask", "labels"}
    assert batch["input_ids"].shape[1] <= 6
    assert torch.equal(batch["attention_mask"] == 0, batch["input_ids"] == 0)
    assert [len(part["labels"]) for part in loaded.final] == [7]
    assert sum(len(part["labels"]) for part in loaded.look) == 5
    held = replace(sentences, hold_out=4).load()
    assert (held.examples, sum(len(part["labels"]) for part in held.final)) == (16, 4)


def test_attention_inside_a_sentence_model_hands_over(sentences):
    loaded = sentences.load()
    plan = segue.methods.dcr_dfg(sites=sentences.sites)
    fitted = segue.fit(
        loaded.build(0),
        plan,
        loaded.train(4, 0),
        sentences.loss,
        recipe=Recipe(steps=5),
        validation=loaded.look,
        progress=None,
        evaluations=5,
    )
    assert "bert.encoder.layer.0.attention.self" in fitted.history[0]["cosine"]
    assert [point["alpha"] for point in fitted.history][::5] == [1.0, 0.0]
    assert fitted.history[0]["blend"]["loss"] != fitted.history[0]["students"]["loss"]
