"""Pictures of what the diagnostics found: files that are there, are PNGs, and show what was measured."""

import struct
import sys

import pytest
import torch
from torch import nn

import segue
from segue.diagnostics import cost, curvature_bias, gate_gradient_variance, loss_path
from segue.errors import ConfigError, MissingExtraError
from segue.gates import Bernoulli, Blend
from tests.diagnostics import reference
from tests.helpers.tiny import SITES, Net


@pytest.fixture(scope="module")
def found():
    of = reference.vit(width=4, batches=1, gate=Bernoulli())
    given = of.handover, of.batches, of.loss
    return {
        "variance": gate_gradient_variance(*given),
        "variance of all gates": gate_gradient_variance(*given, alone=False),
        "curvature": curvature_bias(*given, points=2, iterations=2),
        "path": loss_path(*given, points=3),
        "cost": cost(Net(depth=2), segue.methods.dcr(sites=SITES), torch.randn(2, 5, 8), total_steps=10),
    }


def size_of(path):
    """Read width and height from a PNG's header."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-8:-4] == b"IEND"
    assert 5_000 < len(data) < 500_000
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize(
    ("name", "panels"), [("variance", 2), ("variance of all gates", 1), ("curvature", 1), ("path", 2), ("cost", 1)]
)
def test_a_figure_is_a_png_of_sensible_size_in_a_folder_that_need_not_exist(found, name, panels, tmp_path):
    place = found[name].draw(tmp_path / "new" / f"{name}.png")
    assert place == tmp_path / "new" / f"{name}.png"
    width, height = size_of(place)
    assert (width, height) == (1024, 512 * panels)


def test_a_path_may_be_a_string(found, tmp_path):
    assert size_of(found["path"].draw(str(tmp_path / "path.png")))


def test_a_file_that_is_no_figure_is_refused(found, tmp_path):
    with pytest.raises(ConfigError, match=r"no figure can be written as 'path.txt'"):
        found["path"].draw(tmp_path / "new" / "path.txt")
    assert not (tmp_path / "new").exists()


def test_nothing_at_all_can_be_drawn_too(tmp_path):
    """A blend has no variance by its gates and no bias, one site has no neighbours."""
    of = reference.vit(depth=1, width=4, batches=1, gate=Blend())
    given = of.handover, of.batches, of.loss
    assert size_of(gate_gradient_variance(*given).draw(tmp_path / "variance.png"))
    assert size_of(curvature_bias(*given, points=1, iterations=1).draw(tmp_path / "curvature.png"))
    assert size_of(loss_path(*given, points=2).draw(tmp_path / "path.png"))
    model = nn.Sequential(nn.Linear(2, 2))
    plan = segue.methods.student_only(sites="0")
    assert size_of(cost(model, plan, torch.ones(1, 2), total_steps=1).draw(tmp_path / "cost.png"))


def test_many_sites_find_room_for_their_names(tmp_path):
    of = reference.vit(depth=6, width=2, batches=1, gate=Bernoulli())
    given = of.handover, of.batches, of.loss
    assert size_of(gate_gradient_variance(*given, alone=False, draws=4, most_outcomes=1).draw(tmp_path / "variance.png"))


def test_without_matplotlib_it_says_what_to_install(found, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"matplotlib is not installed(.|\n)*pip install segue\[lab\]"):
        found["cost"].draw(tmp_path / "cost.png")
