"""A transaction: what changes a model succeeds, or leaves it as it was."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def all_or_nothing(model: nn.Module, *others: object) -> Iterator[None]:
    """Restore the structure of a model if a `with` block fails or is interrupted.

    That is every attribute of its modules and configurations (submodules and hooks with their order, modes, `train`), which
    parameters train, and the attributes of other objects. All of it is taken before the first change, so it does not matter at
    which step the block fails. Values of tensors are not copied.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    modules = list(model.modules())
    configurations = [config for m in modules if hasattr(config := getattr(m, "config", None), "__dict__")]
    holders = {id(holder): holder for holder in (*modules, *configurations, *others) if not isinstance(holder, type)}
    attributes = [_Attributes(vars(holder)) for holder in holders.values()]
    try:
        yield
    except BaseException:
        for each in attributes:
            each.restore()
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        raise


class _Attributes:
    """The attributes of one object, and what their containers held; restored in place, because hooks' handles refer to them."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self._attributes = attributes
        self._values = dict(attributes)
        containers = [x for x in attributes.values() if type(x) in (dict, OrderedDict, list, set)]
        self._contents = [(container, container.copy()) for container in containers]

    def restore(self) -> None:
        for name in self._attributes.keys() - self._values.keys():
            del self._attributes[name]
        self._attributes.update(self._values)
        for container, content in self._contents:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)
