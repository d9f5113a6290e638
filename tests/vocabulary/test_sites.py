import numpy as np
import pytest
import torch
from torch import nn

import segue
from segue.errors import SiteError
from tests.helpers.tiny import SITES, Attention, Net


def names(model: nn.Module, selector: object) -> list[str]:
    return [site.name for site in segue.select(model, selector)]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("blocks.*.attn", ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]),
        ("**.attn", ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]),
        ("**.attn.**.qkv", ["blocks.0.attn.qkv", "blocks.1.attn.qkv", "blocks.2.attn.qkv"]),
        ("blocks.{0,2}.attn", ["blocks.0.attn", "blocks.2.attn"]),
        ("blocks.{1..2}.attn", ["blocks.1.attn", "blocks.2.attn"]),
        ("blocks.{0,{1..2}}.{attn,norm}", [f"blocks.{i}.{m}" for i in range(3) for m in ("norm", "attn")]),
        ("blocks.?.at*", ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]),
        (r"re:blocks\.[02]\.attn", ["blocks.0.attn", "blocks.2.attn"]),
        (["head", "blocks.0.attn"], ["blocks.0.attn", "head"]),
        (Attention, ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]),
        (lambda name, module: isinstance(module, nn.Linear) and module.out_features == 3, ["head"]),
    ],
)
def test_select_understands(selector, expected):
    assert names(Net(), selector) == expected


def test_a_site_knows_its_place():
    sites = segue.select(Net(depth=4), "blocks.{2..3}.attn")
    assert [(s.depth, s.index, s.count) for s in sites] == [(2, 0, 2), (3, 1, 2)]
    assert sites[0].members == ("blocks.2.attn",)
    assert segue.select(Net(), "head")[0].depth == 0


def test_a_shared_module_is_one_site_with_aliases():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"first": shared, "other": nn.Linear(4, 4), "again": shared})
    sites = segue.select(model, nn.Linear)
    assert [(s.name, s.aliases) for s in sites] == [("first", ("again",)), ("other", ())]
    assert [s.name for s in segue.select(model, "again")] == ["first"]


def test_nothing_matched_names_the_nearest():
    with pytest.raises(SiteError) as error:
        segue.select(Net(), "blocks.*.atn")
    assert str(error.value) == (
        "pattern 'blocks.*.atn' matched 0 of 32 modules of Net.\n"
        "  Nearest names: blocks.0.attn, blocks.1.attn, blocks.2.attn.\n"
        "  Hint: '*' stands for one name segment, '**' for any number. Nothing was changed."
    )


@pytest.mark.parametrize(
    ("selector", "says"),
    [
        (["head", "nope"], "pattern 'nope' matched 0"),
        (nn.LSTM, "type LSTM matched 0"),
        (lambda name, module: False, "matched 0"),
        ([], "the list of sites is empty"),
        (3, r"select\(sites=...\) must be a selector of sites, got 3."),
        (["head", 3], "In it, item 1 is 3, of type int."),
        ("blocks.{0,1.attn", "an unmatched brace"),
        ("blocks.{0..99999}.attn", "more than 10000 names"),
        ("re:(", "not a regular expression"),
        (["blocks.0", "blocks.0.attn"], "one is inside the other"),
        ("**", "one is inside the other"),
    ],
)
def test_bad_selectors_are_refused(selector, says):
    with pytest.raises(SiteError, match=says):
        segue.select(Net(), selector)


def test_sites_at_or_inside_a_seam_are_refused():
    model = Net()
    segue.replace_(model, segue.Plan(sites="blocks.0.attn"))
    for pattern in ("blocks.0.attn", "blocks.0.attn.student.qkv"):
        with pytest.raises(SiteError, match="already running at 'blocks.0.attn'"):
            segue.select(model, pattern)
    with pytest.raises(segue.SegueError, match="Another one is running"):
        segue.replace_(model, segue.Plan(sites="blocks.1.attn"))


def test_the_root_is_never_a_site():
    assert "" not in names(nn.Sequential(nn.Linear(2, 2)), lambda name, module: isinstance(module, nn.Linear))
    with pytest.raises(SiteError):
        segue.select(nn.Sequential(nn.ReLU()), nn.Sequential)


def test_site_error_is_a_lookup_error():
    with pytest.raises(LookupError):
        segue.select(Net(), "nothing")


def test_patterns_are_case_sensitive_and_whole():
    with pytest.raises(SiteError):
        segue.select(Net(), "Blocks.*.attn")
    with pytest.raises(SiteError):
        segue.select(Net(), "blocks.*.attn.")
    assert names(Net(), SITES) == names(Net(), f"re:{SITES.replace('.', '[.]').replace('*', '[0-9]+')}")


@pytest.mark.parametrize("sites", [nn.Bilinear(2, 2, 2), ["0", nn.Bilinear(2, 2, 2)], nn.Linear(2, 2)])
def test_a_module_itself_selects_no_site(sites):
    with pytest.raises(SiteError, match=r"select\(sites=...\) must be a selector of sites, got ") as error:
        segue.select(nn.Sequential(nn.Linear(2, 2)), sites)
    assert "Hint: give a glob such as 'blocks.*.attn'" in str(error.value)


@pytest.mark.parametrize("sites", [torch.tensor([]), torch.tensor(1.0), np.array("0"), np.array([])])
def test_arrays_without_names_are_refused(sites):
    with pytest.raises(SiteError):
        segue.select(nn.Sequential(nn.Linear(2, 2)), sites)


def test_an_array_of_names_is_a_list_of_names():
    assert [site.name for site in segue.select(nn.Sequential(nn.ReLU(), nn.Tanh()), np.array(["1"]))] == ["1"]
