"""PerSite: the first pattern that matches decides, and a site without one is refused before anything changes."""

import json

import pytest
import torch

import segue
from segue.errors import StudentError
from segue.students import Drop, NarrowMlp, PerSite, Reinit
from tests.helpers import models


def vit():
    return models.build(models.timm_vit("vit_tiny_patch16_224", 3, depth=3))


def test_each_site_gets_its_own_student():
    student = PerSite(students={"blocks.0.mlp": NarrowMlp(ratio=0.25), "blocks.*.mlp": NarrowMlp(ratio=0.5)})
    model = vit()
    handover = segue.replace_(model, segue.Plan(sites="blocks.*.mlp", student=student), total_steps=1)
    assert [seam.student.fc1.out_features for seam in handover.seams.values()] == [48, 96, 96]


def test_a_site_without_a_student_is_refused_and_nothing_changes():
    model = vit()
    before = [id(m) for m in model.modules()]
    plan = segue.Plan(sites="blocks.*.mlp", student=PerSite(students={"blocks.{0,1}.mlp": Reinit()}))
    with pytest.raises(StudentError, match="PerSite has no student for site 'blocks.2.mlp'."):
        segue.replace_(model, plan)
    assert [id(m) for m in model.modules()] == before


def test_a_finished_model_is_rebuilt_from_its_files(tmp_path):
    model = vit().eval()
    student = PerSite(students={"blocks.0.mlp": NarrowMlp(ratio=0.25), "**": Drop(returns="zeros")})
    plan = segue.Plan(sites="blocks.*.mlp", student=student, schedule=segue.schedules.Constant(alpha=0.0))
    assert segue.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    finished = segue.replace_(model, plan, total_steps=1).finalize_()
    segue.save(finished, tmp_path)
    images = models.images().args[0]
    again = segue.load_(vit(), tmp_path).eval()
    assert torch.equal(again(images), finished(images))
