"""The stream of batches: any iterable, the same after a resume, split among processes."""

import random
from collections import OrderedDict, namedtuple
from itertools import chain

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import BatchEncoding

from segue.errors import DataError
from segue.training.batches import Batches, InOrder, Stream, mapped, part_for, size, tensors


def loader(count=10, **settings):
    return DataLoader(TensorDataset(torch.arange(count)), **{"batch_size": 2, "shuffle": True, **settings})


def taken(stream, count):
    return [mapped(lambda t: t.tolist(), next(stream)) for _ in range(count)]


class Augmented:
    """Examples whose numbers come from every global random state, as augmentations do."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item(), random.random(), numpy.random.rand()], dtype=torch.float64)


class Endless(IterableDataset):
    def __iter__(self):
        yield from torch.randperm(7).split(2)


class Epochs:
    """Batches that have set_epoch."""

    def __init__(self):
        self.epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 3

    def __iter__(self):
        return iter([(self.epoch, index) for index in range(3)])


SOURCES = {
    "a list": lambda: [torch.tensor([i]) for i in range(5)],
    "a DataLoader that shuffles": loader,
    "a DataLoader without a length": lambda: DataLoader(Endless(), batch_size=None),
    "augmentations": lambda: DataLoader(Augmented(), batch_size=2, shuffle=True),
    "batches with set_epoch": Epochs,
    "a generator": lambda: (torch.tensor([i]) for i in range(100)),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("place", [0, 1, 3, 4, 5, 6, 10, 11])
def test_a_stream_goes_on_from_any_place(source, place):
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    whole = Stream(SOURCES[source](), seed=3)
    taken(whole, place)
    states = random.getstate(), torch.get_rng_state(), numpy.random.get_state()
    wanted = taken(whole, 13)
    torch.manual_seed(99)
    resumed = Stream(SOURCES[source](), seed=3)
    resumed.skip(place)
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    numpy.random.set_state(states[2])
    assert taken(resumed, 13) == wanted


def test_a_shuffled_order_depends_on_seed_and_epoch_and_nothing_else():
    torch.manual_seed(1)
    first = taken(Stream(loader(), seed=0), 10)
    torch.manual_seed(2)
    torch.rand(7)
    assert taken(Stream(loader(), seed=0), 10) == first
    assert taken(Stream(loader(), seed=1), 10) != first
    assert first[:5] != first[5:]
    for epoch in (first[:5], first[5:]):
        assert sorted(value for (batch,) in epoch for value in batch) == list(range(10))


def test_reading_batches_leaves_the_global_random_states_alone():
    before = random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    taken(Stream(loader()), 12)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert numpy.random.get_state()[1].tolist() == before[2]


def test_batches_and_their_sampler_hear_the_number_of_the_epoch():
    assert taken(Stream(Epochs()), 7) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
    sampler = torch.utils.data.distributed.DistributedSampler(TensorDataset(torch.arange(10)), num_replicas=1, rank=0)
    stream = Stream(loader(sampler=sampler, shuffle=None))
    heard = [sampler.epoch for _ in range(11) if next(stream)]
    assert heard == [0] * 5 + [1] * 5 + [2]


def test_a_generator_that_ends_too_early_is_explained():
    stream = Stream(torch.tensor([i]) for i in range(3))
    taken(stream, 3)
    with pytest.raises(DataError, match="ended after 3 batches and cannot be read again") as caught:
        next(stream)
    assert "a DataLoader, a list" in str(caught.value)


@pytest.mark.parametrize("nothing", [[], iter(())], ids=["list", "generator"])
def test_no_batches_at_all_are_an_error(nothing):
    with pytest.raises(DataError, match="there are no batches"):
        next(Stream(nothing))


Pair = namedtuple("Pair", ["x", "y"])
X, Y = torch.arange(10.0).view(5, 2), torch.arange(5)
KINDS = {
    "tensor": X,
    "tuple": (X, Y),
    "list": [X, Y],
    "named tuple": Pair(X, Y),
    "dict": {"x": X, "y": Y},
    "ordered": OrderedDict(x=X, y=Y),
    "nested": {"inputs": (X, [Y]), "names": "abc", "temperature": 0.5, "nothing": None},
    "hugging face": BatchEncoding({"input_ids": Y.view(5, 1), "attention_mask": X}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_parts_are_the_whole_batch_cut_and_their_weights_make_its_mean(kind, world):
    batch = KINDS[kind]
    parts, weights = zip(*(part_for(batch, rank, world) for rank in range(world)), strict=True)
    assert size(batch) == 5
    assert sum(weights) == pytest.approx(world)
    for index, whole in enumerate(tensors(batch)):
        pieces = [list(tensors(part))[index] for part in parts]
        assert torch.equal(torch.cat(pieces), whole)
        means = [weight * piece.float().mean() for weight, piece in zip(weights, pieces, strict=True)]
        assert (sum(means) / world).item() == pytest.approx(whole.float().mean().item())
        assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
    expected = dict if isinstance(batch, OrderedDict) else type(batch)
    assert all(isinstance(part, expected) for part in parts)


def test_a_batch_smaller_than_the_processes_goes_to_all_of_them():
    for rank in range(3):
        part, weight = part_for((X[:2], Y[:2]), rank, 3)
        assert torch.equal(part[0], X[:2])
        assert weight == 1.0


def test_what_is_not_an_example_each_is_not_cut():
    batch = {"x": X, "scale": torch.tensor(2.0), "table": torch.eye(3), "name": "digits"}
    part, _ = part_for(batch, 1, 2)
    assert len(part["x"]) == 2
    assert (part["scale"].item(), part["table"].shape, part["name"]) == (2.0, (3, 3), "digits")


def test_a_batch_without_tensors_counts_as_one_example():
    assert size({"text": "hello"}) == size(torch.tensor(1.0)) == 1
    assert part_for("hello", 1, 2) == ("hello", 1.0)


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


@pytest.mark.parametrize(("count", "size"), [(10, 3), (9, 3), (1, 5), (0, 5)])
def test_held_out_batches_are_all_examples_in_order(count, size):
    batches = InOrder(count, size, lambda chosen: chosen.tolist())
    assert [*chain(*batches)] == list(range(count))
    assert len(list(batches)) == len(batches)
    assert list(batches) == list(batches)


def padded(lengths, batches):
    return sum(len(batch) * int(lengths[batch].max()) for batch in batches)


def test_batches_by_length_show_every_example_once_with_less_padding():
    lengths = torch.randint(3, 49, (1003,), generator=torch.Generator().manual_seed(0))
    batches, mixed = (Batches(1003, 4, indices, seed=0, lengths=lengths, grouped=grouped) for grouped in (True, False))
    seen = epoch(batches, 0)
    assert len(seen) == len(batches) == 250
    assert all(len(batch) == 4 for batch in seen)
    assert len({*chain(*seen)}) == 1000
    assert padded(lengths, seen) < 0.7 * padded(lengths, epoch(mixed, 0))
    assert padded(lengths, seen) < 1.1 * int(lengths.sum())
    longest = [int(lengths[batch].max()) for batch in seen]
    assert longest != sorted(longest)  # batches are shuffled


def test_the_order_of_batches_by_length_depends_on_seed_and_epoch_alone():
    lengths = torch.arange(40) % 7
    first = Batches(40, 4, noisy, seed=1, lengths=lengths, grouped=True)
    wanted = {number: epoch(first, number) for number in (0, 1)}
    torch.manual_seed(123)
    again = Batches(40, 4, noisy, seed=1, lengths=lengths, grouped=True)
    assert {number: epoch(again, number) for number in (1, 0)} == {number: wanted[number] for number in (1, 0)}
    assert wanted[0] != wanted[1]


@pytest.mark.parametrize("grouped", [False, True])
def test_the_typical_batch_has_the_mean_length_and_reading_it_changes_no_other(grouped):
    lengths = torch.tensor([*range(1, 10), 30])
    batches = Batches(10, 2, noisy, seed=0, lengths=lengths, grouped=grouped)
    before = epoch(batches, 0)
    longest = [int(lengths[chosen].max()) for chosen, _ in before]
    mean = sum(longest) / len(longest)
    typical, _ = batches.typical()
    assert int(lengths[typical].max()) == min(longest, key=lambda one: abs(one - mean))
    assert epoch(batches, 0) == before
    plain = Batches(10, 2, noisy, seed=0)
    assert plain.typical() == next(iter(plain))
