"""A transaction: what changes a model succeeds, or leaves it as it was."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
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
    back = _snapshot(model, *others)
    try:
        yield
    except BaseException:
        back()
        raise


@contextmanager
def restored(model: nn.Module, *others: object) -> Iterator[None]:
    """Let a `with` block change the structure of a model, and the attributes of other objects, and restore them afterwards."""
    back = _snapshot(model, *others)
    try:
        yield
    finally:
        back()


def _snapshot(model: nn.Module, *others: object) -> Callable[[], None]:
    """Take the structure of a model, and return what restores it."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    modules = list(model.modules())
    configurations = [config for m in modules for config in _with_parts(getattr(m, "config", None))]
    holders = {id(holder): holder for holder in (*modules, *configurations, *others) if not isinstance(holder, type)}
    attributes = [_Attributes(vars(holder)) for holder in holders.values()]

    def back() -> None:
        for each in attributes:
            each.restore()
        for parameter, flag in flags:
            parameter.requires_grad_(flag)

    return back


def _with_parts(config: Any) -> Iterator[Any]:
    """Yield a configuration and those inside it."""
    if hasattr(config, "__dict__"):
        yield config
        for part in vars(config).values():
            if hasattr(part, "to_dict"):
                yield from _with_parts(part)


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
