"""The probe of a spec: a module that looks like a family and computes something else is refused."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

import segue
from segue.errors import StudentError
from segue.sites import Site
from segue.students import Softmax
from tests.helpers import models
from tests.students.cases import language_model

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
HERE = Site("here")


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


class TestNotMisread:
    """A module that does more than its interface reads is refused before anything changes."""

    def refused(self, module: nn.Module) -> str:
        with pytest.raises(StudentError, match="[Nn]othing was changed") as caught:
            Softmax()(module, HERE)
        return str(caught.value)

    @pytest.mark.parametrize("setting", ["gated", "scale_norm"])
    def test_timm_attention_with_more(self, setting: str) -> None:
        module = timm.layers.Attention(32, 4, norm_layer=nn.LayerNorm, **{setting: True})
        held = sum(p.numel() for p in module.parameters())
        more = sum(p.numel() for part in (module.gate, module.norm) if part is not None for p in part.parameters())
        said = f"It looks like timm attention, whose interface reads {held - more:,} of its {held:,} parameters."
        assert said in self.refused(module)

    def test_swins_window_attention(self) -> None:
        from timm.models.swin_transformer import WindowAttention

        assert "It looks like timm attention, whose interface reads" in self.refused(WindowAttention(32, 4, window_size=(4, 4)))

    def test_rotation_inside_timms_attention(self) -> None:
        from timm.layers import AttentionRope

        module = AttentionRope(32, 4)
        x, rope = torch.randn(2, 6, 32), torch.randn(6, 16)
        try:
            student = Softmax()(module, HERE)
        except StudentError:
            return
        with pytest.raises(Exception, match="."):
            student(x, rope=rope)

    @pytest.mark.parametrize("setting", ["add_bias_kv", "add_zero_attn"])
    def test_torch_attention_with_more_keys(self, setting: str) -> None:
        self.refused(nn.MultiheadAttention(32, 4, batch_first=True, **{setting: True}))

    def test_capped_logits(self) -> None:
        assert "Its logits are capped at 50.0" in self.refused(self.attention("gemma2"))

    @pytest.mark.parametrize("family", ["glm", "glm4", "cohere", "cohere2", "stablelm", "nemotron", "ernie4_5", "helium"])
    def test_other_rotations(self, family: str) -> None:
        assert "Its rotary embedding is not the rotation by halves of Llama" in self.refused(self.attention(family))

    @pytest.mark.parametrize(
        "family", ["phi", "gpt_oss", "diffllama", "bitnet", "olmo2", "qwen3_next", "llama4_text", "openai-gpt"]
    )
    def test_other_parts(self, family: str) -> None:
        self.refused(self.attention(family))

    def attention(self, family: str) -> nn.Module:
        model = language_model(family)(head_dim=8, num_hidden_layers=4)
        return next(part for name, part in model.named_modules() if name.endswith("attn"))


@pytest.mark.parametrize("family", ["gemma", "granite", "starcoder2", "smollm3", "exaone4"])
def test_other_families_of_llamas_kind_equal_their_teacher_or_are_refused(family: str) -> None:
    make = language_model(family)
    model = models.build(make, head_dim=8, num_hidden_layers=4, attn_implementation="eager").eval()
    ids = models.token_ids()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    try:
        handover = segue.replace_(model, segue.Plan(sites="**.self_attn", student=Softmax()), total_steps=2)
    except StudentError:
        return
    with handover.as_student(), torch.no_grad():
        assert close(model(input_ids=ids).logits, expected)
