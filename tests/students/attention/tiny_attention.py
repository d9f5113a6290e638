"""Register the attention of tests/helpers/tiny.py, so that operators run where the tests of the core run."""

from torch import Tensor, nn

from segue.students import AttentionCall, AttentionInterface, AttentionSpec, projection, register_attention, split_qkv
from tests.helpers import tiny


class TinyAttention(AttentionInterface):
    """One head, called with the tokens alone."""

    def parse(self, module: nn.Module) -> AttentionSpec:
        query, key, value = split_qkv(projection(module.get_submodule("qkv")))
        output = projection(module.get_submodule("proj"))
        return AttentionSpec(heads=1, head_size=8, query=query, key=key, value=value, output=output)

    def unpack(self, x: Tensor) -> AttentionCall:
        return AttentionCall(x)


register_attention(tiny.Attention, TinyAttention)
