import pytest
import torch
from torch import nn

import segue
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
