"""The probe of a spec: a module that looks like a family and computes something else is refused."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from segue.errors import StudentError
from segue.sites import Site
from segue.students import Softmax
from tests.students.cases import language_model

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
HERE = Site("here")


class TestNotMisread:
    """A module that does more than its interface reads is refused before anything changes."""

    def refused(self, module: nn.Module) -> str:
        with pytest.raises(StudentError, match="[Nn]othing was changed") as caught:
            Softmax()(module, HERE)
        return str(caught.value)

    def test_timm_attention_with_more(self) -> None:
        module = timm.layers.Attention(32, 4)
        held = sum(p.numel() for p in module.parameters())
        module.temperature = nn.Parameter(torch.ones(4))
        assert f"{held:,} of its {held + 4:,} parameters are read." in self.refused(module)

    @pytest.mark.parametrize("setting", ["add_bias_kv", "add_zero_attn"])
    def test_torch_attention_with_more_keys(self, setting: str) -> None:
        self.refused(nn.MultiheadAttention(32, 4, batch_first=True, **{setting: True}))

    @pytest.mark.parametrize("family", ["diffllama", "doge"])
    def test_other_parts(self, family: str) -> None:
        self.refused(self.attention(family))

    def attention(self, family: str) -> nn.Module:
        model = language_model(family)(head_dim=8, num_hidden_layers=4)
        return next(part for name, part in model.named_modules() if name.endswith("attn"))
