"""Torchvision imports whatever torch it finds, once segue is imported."""

import pytest

from tests.helpers.processes import run_python

IMPORT = """
import sys
import segue
assert "torch" not in sys.modules
import torchvision
assert torchvision.transforms.Resize(2)
import torch
assert torch.ops.torchvision.nms
"""


@pytest.mark.processes
def test_torchvision_imports_after_segue_in_a_fresh_process():
    pytest.importorskip("torchvision")
    run_python("-c", IMPORT)
