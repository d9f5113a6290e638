import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import segue
from segue.core import kinds
from segue.core.kinds import copied_parameters
from tests.helpers.tiny import SITES, start


def test_rows_columns_and_transposes_of_a_teacher_are_copied():
    torch.manual_seed(0)
    teacher = nn.Linear(6, 9)
    student = nn.ModuleDict(
        {name: nn.Linear(*shape) for name, shape in {"same": (6, 9), "rows": (6, 3), "turned": (9, 6), "new": (6, 3)}.items()}
    )
    with torch.no_grad():
        student["same"].weight.copy_(teacher.weight)
        student["same"].bias.copy_(teacher.bias)
        student["rows"].weight.copy_(teacher.weight[[5, 0, 7]])
        student["rows"].bias.zero_()
        student["turned"].weight.copy_(teacher.weight.T)
    assert copied_parameters(student, teacher) == {"same.weight", "same.bias", "rows.weight", "turned.weight"}


def test_one_changed_number_is_new():
    teacher, student = nn.Linear(6, 9), nn.Linear(6, 9)
    student.load_state_dict(teacher.state_dict())
    student.weight.data[3, 3] += 1e-4
    assert copied_parameters(student, teacher) == {"bias"}


@pytest.mark.parametrize("name", ["LinearAttention", "WindowedLinear"])
def test_an_operator_copies_the_projections_and_its_feature_map_is_new(name):
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3)
    torch.nn.init.normal_(model.blocks[0].attn.qkv.bias)
    settings = {"feature_map": "hedgehog"} if name == "LinearAttention" else {"window": 2}
    student = getattr(segue.students, name)(**settings)
    handover = segue.replace_(model, segue.Plan(sites="blocks.*.attn", student=student))
    kinds = handover.parameter_kinds()
    copied = {part for part, kind in kinds.items() if kind == "copied"}
    assert sum(model.get_parameter(_inside(part)).numel() for part in copied) >= 4 * 192 * 192
    assert any(kind == "new" for kind in kinds.values())
    assert all(".mixer." in part or part.endswith(".bias") for part, kind in kinds.items() if kind == "new"), kinds


def _inside(name: str) -> str:
    return name.replace(".attn.", ".attn.student.", 1)


def test_groups_by_kind_hold_every_parameter_once():
    handover = start(segue.Plan(sites=SITES, train="all"))
    groups = handover.parameter_groups(weight_decay=0.1)
    grouped = [parameter for group in groups for parameter in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in handover.parameters()}
    assert len(grouped) == len({id(p) for p in grouped})
    assert {group["kind"] for group in groups} == {"new", "backbone"}
    assert all((group["weight_decay"] > 0) == (group["params"][0].dim() > 1) for group in groups)


def _holding(**parameters: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, value in parameters.items():
        module.register_parameter(name, nn.Parameter(value, requires_grad=value.is_floating_point() or value.is_complex()))
    return module


def test_complex_and_integer_parameters_are_sorted_too():
    torch.manual_seed(0)
    filters, other = (torch.randn(4, 3, dtype=torch.cfloat) for _ in range(2))
    student = _holding(copied=filters.clone(), new=other, packed=torch.arange(8))
    assert copied_parameters(student, _holding(filters=filters, packed=torch.arange(8))) == {"copied"}
    model = nn.Sequential(nn.Linear(4, 4))
    handover = segue.replace_(model, segue.Plan(sites="0", student=lambda teacher, _: student))
    assert handover.parameter_kinds()["0.copied"] == "new"


def test_few_numbers_in_bfloat16_are_not_taken_for_a_teachers():
    torch.manual_seed(0)
    teacher = _holding(weight=torch.randn(4096).bfloat16(), bias=torch.randn(4096).bfloat16())
    news = {f"new{index}": torch.randn(4).bfloat16() for index in range(20)}
    runs = {"run": teacher.bias[64:96].detach().clone(), "odd": teacher.weight[7:20].detach().clone()}
    repeated = teacher.weight[:32].detach().reshape(2, 16).repeat(1, 2).flatten()  # a head for two
    assert copied_parameters(_holding(**news, **runs, repeated=repeated), teacher) == {*runs, "repeated"}


@pytest.mark.parametrize("shape", [(512, 512), (2048, 1024)])
def test_rounding_in_another_order_is_no_difference(shape):
    torch.manual_seed(0)
    teacher = _holding(weight=torch.randn(*shape))  # transformers' Conv1D has its weight transposed
    assert copied_parameters(_holding(weight=teacher.weight.detach().T.contiguous()), teacher) == {"weight"}


def test_a_large_matrix_is_compared_in_parts(monkeypatch):
    teacher = _holding(weight=torch.randn(37, 11))
    student = _holding(same=teacher.weight.detach().clone(), turned=teacher.weight.detach().T.clone(), new=torch.randn(37, 11))
    monkeypatch.setattr(kinds, "CHUNK", 30)
    assert copied_parameters(student, teacher) == {"same", "turned"}


def test_a_sharded_teacher_is_read_whole(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = torch.randn(6, 6)
        teacher = _holding(weight=distribute_tensor(weight, mesh, [Shard(0)]))
        assert copied_parameters(_holding(weight=distribute_tensor(weight, mesh, [Shard(0)])), teacher) == {"weight"}
        assert copied_parameters(_holding(weight=distribute_tensor(weight + 1, mesh, [Shard(0)])), teacher) == set()
    finally:
        torch.distributed.destroy_process_group()
