"""Counting by shapes alone: the same numbers as real steps, and real steps where values matter."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import segue
from segue.diagnostics import costs
from segue.diagnostics.costs import _any_loss, _counted, cost
from segue.diagnostics.counting import saved_bytes
from segue.diagnostics.shapes import drop_values_
from segue.students import LinearAttention, Reinit, SlidingWindow, WindowedLinear
from tests.helpers.models import CASES, build, llama

CASE = {case.name: case for case in CASES}


@pytest.mark.parametrize(
    "student", [Reinit(), LinearAttention(), SlidingWindow(window=3)], ids=lambda student: type(student).__name__
)
@pytest.mark.parametrize("method", ["dcr_dfg", "theseus", "distillation", "local_fit"])
@pytest.mark.parametrize("name", ["timm vit_tiny", "HF ViT"])
def test_the_quick_count_is_the_slow_one(name, method, student):
    case = CASE[name]
    batch = case.batch()
    plan = segue.methods.ALL[method](sites=case.sites, student=student)
    given = (case.build(), plan, batch.kwargs or batch.args, 10, _any_loss)
    assert _counted(*given, values=False) == _counted(*given, values=True)


@pytest.mark.parametrize("student", [Reinit(), WindowedLinear(window=4)], ids=lambda student: type(student).__name__)
@pytest.mark.parametrize("settings", [{}, {"use_cache": False}], ids=["with a cache", "without"])
def test_a_language_model_with_grouped_queries_is_counted_quickly(settings, student, monkeypatch):
    model = build(lambda: llama(tie_word_embeddings=True))
    plan = segue.methods.dcr_dfg(sites="model.layers.*.self_attn", student=student)
    given = (plan, {"input_ids": torch.zeros(2, 7, dtype=torch.long), **settings})
    slow = _counted(model, *given, 10, _any_loss, values=True)
    monkeypatch.setattr(costs, "_counted", lambda *args, values: _counted(*args, values=values) if not values else None)
    assert cost(model, *given, total_steps=10) == slow


def test_packed_texts_are_counted_by_real_steps():
    model = build(llama)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    batch = {"input_ids": torch.zeros(1, 7, dtype=torch.long), "position_ids": positions, "use_cache": False}
    plan = segue.methods.dcr_dfg(sites="model.layers.*.self_attn")
    whole = {**batch, "position_ids": torch.arange(7)[None]}
    packed, alone = (cost(model, plan, given, total_steps=10).student_only.saved_bytes for given in (batch, whole))
    assert packed == _counted(model, plan, batch, 10, _any_loss, values=True).student_only.saved_bytes
    assert packed != alone  # of packed texts a mask is kept


class Looks(nn.Module):
    """A model whose work depends on values."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), norm, nn.Linear(4, 4)

    def forward(self, x):
        x = self.norm(self.first(x))
        return self.last(self.last(x)) if x.sum() > -1e9 else x


@pytest.mark.parametrize("norm", [nn.Identity(), nn.BatchNorm1d(4)])
def test_where_values_matter_real_steps_are_taken(norm):
    model, x = Looks(norm), torch.randn(3, 4)
    plan = segue.methods.dcr(sites="first")
    assert cost(model, plan, x, total_steps=10) == _counted(model, plan, x, 10, _any_loss, values=True)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("mask", [None, torch.ones(5, 5).tril().bool(), torch.zeros(2, 1, 5, 5)])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_keeps_what_it_keeps_on_a_cpu(mask, grouped):
    q, k = torch.randn(2, 4, 5, 8, requires_grad=True), torch.randn(2, 2 if grouped else 4, 5, 8, requires_grad=True)

    def kept(q, k, mask):
        return saved_bytes(lambda: F.scaled_dot_product_attention(q, k, k, mask, enable_gqa=grouped).sum(), [q, k])

    meta = (x if x is None else x.detach().to("meta").requires_grad_(x.requires_grad) for x in (q, k, mask))
    before = F.scaled_dot_product_attention
    assert kept(*meta) == kept(q, k, mask)
    assert F.scaled_dot_product_attention is before


def test_what_is_tied_stays_tied():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6))
    model[1].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    names = [name for name, _ in copy.deepcopy(model).named_parameters()]
    drop_values_(model, None)
    assert model[1].weight is model[0].weight
    assert not model[1].weight.requires_grad
    assert [name for name, _ in model.named_parameters()] == names
    assert {x.device.type for x in model.state_dict().values()} == {"meta"}
