"""Layers of flash-linear-attention need Triton and a GPU; a stand-in with the signature of its GatedDeltaNet takes their place.

What is checked is how Segue builds and calls them, not the kernels.
"""

import json
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import segue
from segue.errors import MissingExtraError, PlanError, StudentError
from segue.sites import Site
from segue.students import FlaLayer
from segue.students.attention import fla as module
from tests.helpers.models import VOCABULARY, bert, build, gpt2, llama, padding, text, token_ids
from tests.students.handing_over import compiled_equals_eager, through_a_handover, timm_vit

SITES = {"HF Llama": (llama, "model.layers.*.self_attn"), "HF GPT-2": (gpt2, "transformer.h.*.attn")}


class GatedDeltaNet(nn.Module):
    """A causal mean of values, which skips padding: the constructor, the call and the answer are the real layer's."""

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if not float(head_dim * expand_v).is_integer():
            raise ValueError(f"expand_v={expand_v} does not produce an integer value.")
        self.sizes = (hidden_size, num_heads, head_dim, layer_idx)
        self.v_proj = nn.Linear(hidden_size, int(num_heads * head_dim * expand_v), bias=False)
        self.o_proj = nn.Linear(int(num_heads * head_dim * expand_v), hidden_size, bias=False)
        self.seen: list[Tensor | None] = []

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        assert attention_mask is None or attention_mask.shape == hidden_states.shape[:2]
        assert past_key_values is None
        if not torch.compiler.is_compiling():
            self.seen.append(attention_mask)
        keep = torch.ones(hidden_states.shape[:2]) if attention_mask is None else attention_mask
        v = F.silu(self.v_proj(hidden_states)) * keep[..., None]
        o = self.o_proj(v.cumsum(1) / keep.cumsum(1).clamp_min(1)[..., None])
        return o * keep[..., None], None, past_key_values


class GatedLinearAttention(nn.Module):
    def __init__(
        self, mode: str = "chunk", hidden_size: int = 1024, num_heads: int = 4, num_kv_heads: int | None = None
    ) -> None:
        super().__init__()
        self.sizes = (hidden_size, num_heads, num_kv_heads)
        self.o_proj = nn.Linear(hidden_size, hidden_size)


@pytest.fixture
def fla(monkeypatch):
    """Install the stand-in, and say that it needs no GPU."""
    package, layers = ModuleType("fla"), ModuleType("fla.layers")
    layers.GatedDeltaNet, layers.GatedLinearAttention = GatedDeltaNet, GatedLinearAttention
    package.layers = layers
    monkeypatch.setitem(sys.modules, "fla", package)
    monkeypatch.setitem(sys.modules, "fla.layers", layers)
    monkeypatch.setattr(module, "NEEDS_GPU", False)


def attention(make=llama) -> tuple[nn.Module, Site]:
    model = build(make)
    return (model.model.layers[1].self_attn, Site("x")) if make is llama else (model.transformer.h[1].attn, Site("x"))


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("case", SITES)
def test_it_goes_through_a_handover(case, tmp_path):
    make, sites = SITES[case]
    student = FlaLayer("GatedDeltaNet", settings={"expand_v": 1.5})
    model = through_a_handover(make, text(), segue.Plan(sites=sites, student=student), tmp_path)
    assert sum(isinstance(module, GatedDeltaNet) for module in model.modules()) == 2


@pytest.mark.usefixtures("fla")
def test_the_teacher_says_the_sizes_and_settings_win():
    teacher, site = attention()
    student = FlaLayer("GatedDeltaNet")(teacher, site)
    assert student.layer.sizes == (32, 4, 8, 1)
    assert student.layer_idx == 1
    assert FlaLayer("GatedDeltaNet", settings={"num_heads": 2, "layer_idx": 7})(teacher, site).layer.sizes == (32, 2, 8, 7)
    assert FlaLayer("GatedLinearAttention")(teacher, site).layer.sizes == (32, 4, 2)  # Llama's two key and value heads
    assert FlaLayer("GatedDeltaNet")(teacher.double(), site).layer.v_proj.weight.dtype == torch.float64


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("case", SITES)
def test_padding_reaches_the_layer_and_its_content_changes_nothing(case):
    make, sites = SITES[case]
    model = build(make)
    handover = segue.replace_(model, segue.Plan(sites=sites, student=FlaLayer("GatedDeltaNet")), total_steps=1)
    mask = padding()
    ids = token_ids()
    other = torch.where(mask.bool(), ids, (ids + 1) % VOCABULARY)
    with handover.as_student(), torch.no_grad():
        model.eval()
        first, second = (model(input_ids=x, attention_mask=mask).logits for x in (ids, other))
        layer = next(module for module in model.modules() if isinstance(module, GatedDeltaNet))
        assert torch.equal(layer.seen[-1], mask)
        model(input_ids=ids)
        assert layer.seen[-1] is None
    torch.testing.assert_close(first[mask.bool()], second[mask.bool()])


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("case", SITES)
def test_generation_with_a_cache_is_generation_without(case):
    make, sites = SITES[case]
    model = build(make)
    segue.replace_(model, segue.Plan(sites=sites, student=FlaLayer("GatedDeltaNet")), total_steps=1).finalize_(force=True)
    model.eval()
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = token_ids()[:2]
    for mask in (torch.ones_like(ids), torch.ones_like(ids).index_fill(1, torch.tensor([0, 1]), 0)):  # and padded on the left
        whole = model.generate(ids, attention_mask=mask, use_cache=False, **settings)
        for cache in ("dynamic", "static"):  # a static one has room for more than was seen
            cached = model.generate(ids, attention_mask=mask, cache_implementation=cache, **settings)
            assert torch.equal(cached, whole)


@pytest.mark.usefixtures("fla")
def test_gpt2s_dropout_stays_and_others_find_what_they_read():
    student = FlaLayer("GatedDeltaNet")(*attention(gpt2))
    assert student.output_dropout.p == 0.1
    dropped = student.train()(torch.randn(2, 7, 32))[0] == 0
    assert 0 < dropped.float().mean() < 0.5
    assert student.layer_idx == 1
    assert student.is_causal


@pytest.mark.slow
@pytest.mark.usefixtures("fla")
def test_it_compiles_as_one_graph():
    compiled_equals_eager(FlaLayer("GatedDeltaNet")(*attention(gpt2)).eval(), torch.randn(2, 7, 32))


def test_it_saves_as_data_without_the_package():
    plan = segue.Plan(sites="a", student=FlaLayer("GatedDeltaNet", settings={"expand_v": 1.0, "use_gate": False}))
    assert segue.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def refusal(student: FlaLayer, teacher: nn.Module, kind: type[Exception] = StudentError) -> list[str]:
    with pytest.raises(kind) as error:
        student(teacher, Site("layers.0.self_attn"))
    lines = str(error.value).splitlines()
    assert lines[0] == f"FlaLayer({student.name!r}) cannot replace the module at site 'layers.0.self_attn'."
    assert len(lines) == 3
    return [line.strip() for line in lines[1:]]


def test_without_the_package():
    found, hint = refusal(FlaLayer("GatedDeltaNet"), attention()[0], MissingExtraError)
    assert found == "It needs flash-linear-attention, which is not installed."
    assert hint == "Hint: pip install flash-linear-attention, on a machine with a GPU."


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (ModuleNotFoundError("No module named 'triton'", name="triton"), "It needs Triton, which is not installed."),
        (ImportError("libcuda.so is broken"), "flash-linear-attention does not import: libcuda.so is broken."),
    ],
)
def test_without_triton(monkeypatch, error, found):
    def broken(name: str) -> ModuleType:
        raise error

    monkeypatch.setattr(module, "import_module", broken)
    assert refusal(FlaLayer("GatedDeltaNet"), attention()[0], MissingExtraError)[0] == found


@pytest.mark.usefixtures("fla")
def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(module, "NEEDS_GPU", True)
    found, hint = refusal(FlaLayer("GatedDeltaNet"), attention()[0])
    assert found == "The kernels of flash-linear-attention need a GPU, and the teacher is on the CPU."
    assert hint == "Hint: move the model to a GPU first: model.cuda(). Nothing was changed."


def test_a_gpu_is_needed_as_shipped():
    assert module.NEEDS_GPU


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("teacher", ["timm", "bert"])
def test_a_model_that_sees_the_future_is_refused(teacher):
    module = build(timm_vit).blocks[0].attn if teacher == "timm" else build(bert).bert.encoder.layer[0].attention.self
    found, hint = refusal(FlaLayer("GatedDeltaNet"), module)
    assert found == "The layer is causal, and its teacher is not."
    assert hint == "Hint: use an operator of segue.students in models that are not causal. Nothing was changed."


@pytest.mark.usefixtures("fla")
def test_unknown_names_and_settings():
    teacher = attention()[0]
    assert refusal(FlaLayer("GatedDeltaNets"), teacher)[0] == (
        "flash-linear-attention has no layer 'GatedDeltaNets'. Nearest names: GatedDeltaNet."
    )
    found, _ = refusal(FlaLayer("GatedDeltaNet", settings={"expand_w": 1.0}), teacher)
    assert found == "GatedDeltaNet has no setting 'expand_w'. Nearest names: expand_v."
    found, hint = refusal(FlaLayer("GatedDeltaNet", settings={"expand_v": 0.3}), teacher)
    assert found.endswith("expand_v=0.3) raises: expand_v=0.3 does not produce an integer value.")
    assert hint == "Hint: give the settings that the layer needs: FlaLayer(name, settings={...}). Nothing was changed."


@pytest.mark.parametrize("name", ["fla:GatedDeltaNet", "layers.GatedDeltaNet", ""])
def test_names_of_another_form(name):
    with pytest.raises(PlanError, match=r"does not name a layer\.\n  The name of a class in fla\.layers is needed"):
        FlaLayer(name)


@pytest.mark.usefixtures("fla")
def test_a_mask_that_says_more_than_padding_is_refused():
    student = FlaLayer("GatedDeltaNet")(*attention(gpt2))
    window = torch.ones(7, 7).tril().triu(-2).bool()[None, None].expand(2, 1, 7, 7)
    with pytest.raises(StudentError, match="It hides more than padding and the future"):
        student(torch.randn(2, 7, 32), attention_mask=window)
