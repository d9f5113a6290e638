"""Costs: counted ones against counts of the modules by hand, timed ones against what must be true of them."""

import pytest
import torch

from segue.diagnostics.counting import cache_bytes, flops
from segue.planning.costs import CostTable, measure_costs
from tests.helpers import models
from tests.planning import cases


def test_operations_and_parameters_are_those_of_the_modules():
    model, batches, settings = cases.vit_parts()
    with cases.tried(model, batches, settings) as candidates:
        found = measure_costs(candidates, batches[0])
        students = dict(candidates.students)
    model.eval()
    inputs = {}
    for name in found.teachers:
        model.get_submodule(name).register_forward_pre_hook(lambda _m, args, name=name: inputs.update({name: args[0]}))
    with torch.no_grad():
        assert found.total["flops"] == flops(lambda: model(batches[0]))
        for name, cost in found.teachers.items():
            module = model.get_submodule(name)
            assert cost["flops"] == flops(lambda module=module, name=name: module(inputs[name]))
            assert cost["parameters"] == sum(p.numel() for p in module.parameters())
        for (name, candidate), cost in found.students.items():
            student = students[name, candidate]
            assert cost["flops"] == flops(lambda student=student, name=name: student(inputs[name]))
    assert found.total["parameters"] == sum(p.numel() for p in model.parameters())
    assert found.saved(("blocks.0.mlp", "Drop(returns='zeros')"), "flops") == pytest.approx(
        found.teachers["blocks.0.mlp"]["flops"] / found.total["flops"]
    )
    assert "cache_bytes" not in found.total
    assert all(cost[name] > 0 for cost in found.teachers.values() for name in ("prefill", "train"))
    assert all(cost["train"] > cost["prefill"] for cost in found.teachers.values())
    assert CostTable.from_dict(found.to_dict()) == found


def test_the_cache_is_counted_site_by_site():
    model, batches, settings = cases.llama()
    ids = {"input_ids": models.token_ids().repeat(1, 4)}
    with cases.tried(model, batches, settings) as candidates:
        found = measure_costs(candidates, ids)
        shown = {}
        for name in ("LinearAttention", None):
            with candidates.showing([o for o in candidates.options if o[1] == name]) as view:
                shown[name] = cache_bytes(view(**ids, use_cache=True).past_key_values)
    assert found.total["cache_bytes"] == shown[None] == sum(cost["cache_bytes"] for cost in found.teachers.values())
    linear = [cost["cache_bytes"] for (_, name), cost in found.students.items() if name == "LinearAttention"]
    assert sum(linear) == shown["LinearAttention"]
    assert all(cost["decode"] > 0 for cost in (*found.teachers.values(), *found.students.values()))
