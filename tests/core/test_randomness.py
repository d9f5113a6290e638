"""The random states of a process: saved, restored, seeded."""

import json
import random

import numpy as np
import torch

from segue.core import randomness


def draw() -> tuple[float, float, float]:
    return random.random(), torch.rand(()).item(), float(np.random.rand())


def test_restored_states_draw_the_same_numbers():
    before = randomness.states()
    first = draw()
    randomness.restore(before)
    assert draw() == first


def test_states_but_for_torchs_are_plain_data():
    states = randomness.states()
    torch_state = states.pop("torch")
    restored = json.loads(json.dumps(states)) | {"torch": torch_state}
    first = draw()
    randomness.restore(restored)
    assert draw() == first


def test_a_block_leaves_no_trace():
    with randomness.kept():
        first = draw()
    assert draw() == first


def test_seeds_depend_on_every_number():
    drawn = []
    with randomness.kept():
        for numbers in ((1,), (1, 2), (2, 1), (1, 2)):
            randomness.seed_all(*numbers)
            drawn.append(draw())
    assert drawn[1] == drawn[3]
    assert len(set(drawn)) == 3


def test_one_number_is_the_seed_that_torch_takes():
    with randomness.kept():
        randomness.seed_all(2**40 + 3)
        found = draw()
        random.seed(2**40 + 3)
        torch.manual_seed(2**40 + 3)
        np.random.seed((2**40 + 3) % 2**32)
        assert draw() == found


def test_one_process_restores_its_own_state_and_a_new_one_keeps_its_own():
    gathered = randomness.states_of_every_rank()
    assert len(gathered) == 1
    first = draw()
    randomness.restore_this_rank(gathered)
    assert draw() == first
    randomness.restore_this_rank([])  # more ranks than were saved
    assert draw() != first
