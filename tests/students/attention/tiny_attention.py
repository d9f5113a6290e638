"""Teach Segue the attention of tests/tiny.py, so that operators run where the tests of the core run."""

from torch import Tensor, nn

from segue.students import Call, Geometry, Interface, projection, teach, thirds
from tests.helpers import tiny


class TinyAttention(Interface):
    """One head, called with the tokens alone."""

    def read(self, module: nn.Module) -> Geometry:
        query, key, value = thirds(projection(module.get_submodule("qkv")))
        output = projection(module.get_submodule("proj"))
        return Geometry(heads=1, head_size=8, query=query, key=key, value=value, output=output)

    def receive(self, x: Tensor) -> Call:
        return Call(x)


teach(tiny.Attention, TinyAttention)
