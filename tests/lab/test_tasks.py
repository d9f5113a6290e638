"""Tasks: the same batches for every method, balanced fractions, and held-out parts that stay held out."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import segue
from segue.data import Crop, Digits, Tsv
from segue.data.dataset import TextDataset
from segue.diagnostics.counting import flops
from segue.errors import ConfigError
from segue.lab.config import Run, Teacher
from segue.lab.models import SentenceClassifier, SmallViT
from segue.lab.run import run
from segue.lab.tasks import ImageTask, SentenceTask
from segue.training.recipe import Recipe
from tests.helpers.tiny_runs import TASK


def test_batches_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    loaded = ImageTask(source=Digits(), model=SmallViT(depth=1), augment=Crop(pad=1)).load(data_fraction=0.1)
    list(loaded.train(16, 0))
    loaded.build(0)
    assert torch.equal(torch.get_rng_state(), before)


# Fractions


def labels_of(task, **settings):
    """Return the labels to train on, all of them, in the order of one epoch."""
    loaded = task.load(**settings)
    (batch,) = loaded.train(loaded.examples, 0)
    assert len(batch[1]) == loaded.examples
    return loaded, batch


@pytest.mark.parametrize("data_fraction", [1.0, 0.5, 0.2, 0.05, 0.001])
def test_a_fraction_of_the_data_is_the_same_fraction_of_every_class(data_fraction):
    whole = Counter(TASK.source().train.labels.tolist())
    _, (_, labels) = labels_of(TASK, data_fraction=data_fraction)
    found = Counter(labels.tolist())
    assert found == {label: max(1, round(data_fraction * count)) for label, count in whole.items()}


def test_fractions_depend_on_the_seed_alone_and_their_order_is_not_sorted_by_class():
    images = {seed: labels_of(TASK, data_fraction=0.2, seed=seed)[1][0] for seed in (0, 1)}
    again = labels_of(TASK, data_fraction=0.2, seed=0)[1]
    assert torch.equal(again[0], images[0])
    assert not torch.equal(images[1], images[0])
    assert again[1].tolist() != sorted(again[1].tolist())
    once = {image.numpy().tobytes() for image in images[0]}
    assert len(once) > 0.95 * len(images[0])  # hardly any digit is in the data twice


@pytest.mark.parametrize("data_fraction", [0.0, -0.5, 1.5, float("nan")])
def test_a_fraction_that_is_none_is_refused(data_fraction):
    with pytest.raises(ConfigError, match=rf"data_fraction=...\) must be a number above 0 and at most 1, got {data_fraction}"):
        TASK.load(data_fraction=data_fraction)


def test_examples_held_out_to_choose_settings_by_are_never_trained_on():
    task = replace(TASK, hold_out=300, eval_examples=100)
    for seed in (0, 1):
        loaded, (images, _) = labels_of(task, seed=seed)
        assert loaded.examples == 1297 - 300
        held = torch.cat([batch[0] for batch in loaded.final])
        assert len(held) == 300
        known = TASK.source().train.inputs.unique(dim=0)
        train, judge = ({image.numpy().tobytes() for image in part} for part in (images, held))
        doubles = 1297 - len(known)
        assert len(train & judge) <= doubles
        seen = torch.cat([batch[0] for batch in loaded.validation])
        assert torch.equal(seen, held[:100])
    test_part = torch.cat([batch[0] for batch in TASK.load().final])
    assert not any(torch.equal(held[0], image) for image in test_part)


@pytest.mark.parametrize("hold_out", [1297, 5000])
def test_nothing_left_to_train_on_is_refused(hold_out):
    with pytest.raises(ConfigError, match=f"hold_out must be .*, got {hold_out}") as caught:
        replace(TASK, hold_out=hold_out).load()
    assert "There are 1297 training examples." in str(caught.value)


def test_held_out_digits_are_the_test_part_normalised_as_the_training_part_is():
    data, loaded = TASK.source(), TASK.load()
    images, labels = (torch.cat(parts) for parts in zip(*loaded.final, strict=True))
    assert torch.equal(labels, data.test.labels)
    torch.testing.assert_close(images, (data.test.inputs / 255 - data.mean[0]) / data.std[0])
    seen = torch.cat([batch[0] for batch in loaded.validation])
    assert torch.equal(seen, images[:100])
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
    """Recorded in the trainings themselves, over more than one epoch, with augmentation and a fraction of the data."""
    task = replace(TASK, augment=Crop(pad=1))

    def seen(method, seed):
        loaded = task.load(data_fraction=0.05, seed=seed)
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
        eval_examples=5,
    )


def test_sentences_become_padded_batches_with_labels(sentences):
    loaded = sentences.load(data_fraction=0.5)
    batch = next(iter(loaded.train(4, 0)))
    assert loaded.examples == 10
    assert set(batch) >= {"input_ids", "attention_mask", "labels"}
    assert batch["input_ids"].shape[1] <= 6
    assert torch.equal(batch["attention_mask"] == 0, batch["input_ids"] == 0)
    assert [len(part["labels"]) for part in loaded.final] == [7]
    assert sum(len(part["labels"]) for part in loaded.validation) == 5
    held = replace(sentences, hold_out=4).load()
    assert (held.examples, sum(len(part["labels"]) for part in held.final)) == (16, 4)


def test_sentences_of_similar_length_share_a_batch(sentences):
    task = replace(sentences, group_by_length=True)
    batches = task.load().train(2, 0)
    assert torch.equal(batches.lengths, torch.tensor([(4, 6, 6)[i % 3] for i in range(20)]))  # cut at six tokens
    padding = [int((batch["attention_mask"] == 0).sum()) for batch in batches]
    assert sum(padding) <= 2  # one batch at most has both lengths
    assert sum(int((batch["attention_mask"] == 0).sum()) for batch in sentences.load().train(2, 0)) > 2


@pytest.mark.parametrize("count", [64, 100])
def test_evaluations_by_length_see_the_same_sentences_with_less_padding(sentences, count):
    words = ["a", "very", "not", "good", "film"]
    texts = [" ".join(words[(i + j) % 5] for j in range(1 + (7 * i) % 13)) for i in range(100)]
    data = TextDataset(
        train_texts=texts, train_labels=torch.zeros(100), test_texts=texts, test_labels=torch.arange(100), classes=2
    )
    task = replace(sentences, source=lambda: data, longest=20, eval_examples=count)
    mixed, grouped = (list(replace(task, group_by_length=by_length).load().validation) for by_length in (False, True))

    def rows(batches):
        return {
            int(label): ids[mask.bool()].tolist()
            for batch in batches
            for label, ids, mask in zip(batch["labels"], batch["input_ids"], batch["attention_mask"], strict=True)
        }

    def padding(batches):
        return sum(int((batch["attention_mask"] == 0).sum()) for batch in batches)

    assert rows(grouped) == rows(mixed)
    assert set(rows(mixed)) == set(range(count))
    assert padding(grouped) <= 0.5 * padding(mixed)
    assert abs(int(grouped[0]["attention_mask"][0].sum()) - 9) <= 1  # of 3 to 15 tokens


@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_operations_are_counted_on_sentences_of_mean_length(sentences, seed, by_length, tmp_path):
    task = replace(sentences, group_by_length=by_length, longest=16)
    teacher = Teacher(task=task, stages=())
    names = {"experiment": "tests", "method": "student_only", "label": "Student only"}
    settings = {"task": task, "teacher": teacher, "batch": 2, "recipe": Recipe(steps=1), "diagnostics": ()}
    result = run(Run(plan=segue.methods.student_only(sites=task.sites), seed=seed, **names, **settings), tmp_path)
    batches = task.load().train(2, seed)
    longest = [batch["input_ids"].shape[1] for batch in batches]
    mean = sum(longest) / len(longest)
    assert batches.typical()["input_ids"].shape[1] == min(longest, key=lambda one: abs(one - mean))
    wanted = _count(task, batches.typical())
    assert result.train_info.step_flops["teacher_pass"] == wanted
    assert any(_count(task, batch) != wanted for batch in batches)


def _count(task, batch):
    model = task.load().build(0).eval()
    return flops(lambda: model(**{name: value for name, value in batch.items() if name != "labels"}))


def test_attention_inside_a_sentence_model_hands_over(sentences):
    loaded = sentences.load()
    plan = segue.methods.dcr_dfg(sites=sentences.sites)
    fitted = segue.fit(
        loaded.build(0),
        plan,
        loaded.train(4, 0),
        sentences.loss,
        recipe=Recipe(steps=5),
        validation=loaded.validation,
        progress=None,
        evaluations=5,
    )
    assert "bert.encoder.layer.0.attention.self" in fitted.history[0]["cosine"]
    assert [point["alpha"] for point in fitted.history][::5] == [1.0, 0.0]
    assert fitted.history[0]["blend"]["loss"] != fitted.history[0]["students"]["loss"]
