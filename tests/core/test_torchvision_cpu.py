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


BY_HAND = """
import torch
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import segue, torchvision
"""

LOOKED_FOR_FIRST = """
import importlib.util
import segue
importlib.util.find_spec("torchvision")
importlib.reload(segue)
import torchvision
"""

OTHER_FINDERS = """
import sys

class Seen:
    names = []
    def find_spec(self, name, path=None, target=None):
        self.names.append(name)

sys.meta_path.insert(0, Seen())
import segue
import torchvision
assert "torchvision" in Seen.names
"""

FOUND_BY_ANOTHER = """
import sys
from importlib.machinery import PathFinder

class Finds:
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, path) if name == "torchvision" else None

sys.meta_path.insert(0, Finds())
import segue
import torchvision
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "code",
    [BY_HAND, LOOKED_FOR_FIRST, OTHER_FINDERS, FOUND_BY_ANOTHER],
    ids=["by hand", "looked for first", "other finders", "found by another"],
)
def test_it_is_prepared_once_and_hides_no_other_finder(code):
    pytest.importorskip("torchvision")
    run_python("-c", code)


@pytest.mark.processes
def test_torchvision_imports_after_segue_in_a_fresh_process():
    pytest.importorskip("torchvision")
    run_python("-c", IMPORT)
