"""Two models compared: the numbers are those of naive loops."""

import pytest
import torch
from torch.nn import functional as F

from segue.convert import compare
from tests.convert.small_models import model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 300, (5, 14), generator=torch.Generator().manual_seed(3))


def test_losses_choices_and_divergence_are_those_of_a_naive_loop(ids):
    models = {"original": model("llama", 0), "converted": model("llama", 1)}
    with torch.no_grad():
        found = compare.token_by_token(models, ids)
        for text in range(5):
            for position in range(1, 14):
                before, truth = ids[text : text + 1, :position], ids[text, position]
                p, q = (each(input_ids=before).logits[0, -1].double().softmax(-1) for each in models.values())
                at = (text, position - 1)
                assert found["loss_original"][at] == pytest.approx(-p[truth].log().item(), rel=1e-4)
                assert found["loss_converted"][at] == pytest.approx(-q[truth].log().item(), rel=1e-4)
                assert found["kl"][at] == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-3, abs=1e-5)
                assert found["same_first_choice"][at] == (p.argmax() == q.argmax())
                assert found["accuracy_converted"][at] == (q.argmax() == truth)


@pytest.mark.parametrize("last", [1, 2, 3, 4, 15, 16, 100, 1023])
def test_every_position_is_in_one_bin(last):
    bins = compare.position_bins(last)
    assert [position for a, b in bins for position in range(a, b + 1)] == list(range(1, last + 1))


def test_neighbours_are_those_of_a_naive_search():
    vectors = F.normalize(torch.randn(7, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    nearest = [max((j for j in range(7) if j != i), key=lambda j, i=i: vectors[i] @ vectors[j]) for i in range(7)]
    assert compare.neighbours(vectors).tolist() == nearest
