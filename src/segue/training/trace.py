"""Trace a forward and its backward: the first module that turns finite numbers into inf or NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from segue.core.blending import blendable, tensors


def finite(tree: Any) -> bool:
    """Return whether all numbers of a tree are finite; an additive mask, of zeros and -inf, counts as finite."""
    return all(_finite(tensor.detach()) for tensor in tensors(tree) if blendable(tensor))


def _finite(x: Tensor) -> bool:
    if bool(torch.isfinite(x).all()):
        return True
    return not x.is_complex() and bool(((x == 0) | (x == -math.inf)).all() and (x == 0).any())


@dataclass(eq=False)
class Call:
    """One call of a module: whether its input is finite, and whether the gradient of its output is, if it has one."""

    module: nn.Module
    outer: Call | None
    clean: bool
    gradient: bool | None = None

    def around(self) -> Iterator[Call]:
        """Yield the calls that contain this one, from the inside out."""
        outer = self.outer
        while outer is not None:
            yield outer
            outer = outer.outer


@dataclass
class Trace:
    """Watch named modules while `watching()`; hooks are on them in that time only."""

    modules: Mapping[nn.Module, str]
    gradients: bool  # also watch the backward
    backward: nn.Module | None = None  # the first that turns a finite gradient into inf or NaN
    parameter: str | None = None  # or the first parameter whose gradient is inf or NaN
    from_loss: bool = False  # or the gradient is inf or NaN before it reaches a module
    _calls: list[Call] = field(default_factory=list)
    _first: Call | None = None

    @property
    def forward(self) -> nn.Module | None:
        """The first module that turns finite input into inf or NaN, unless what contains it returns finite output after all."""
        return None if self._first is None else self._first.module

    @property
    def in_backward(self) -> bool:
        return self.backward is not None or self.parameter is not None or self.from_loss

    @contextmanager
    def watching(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Put hooks on modules and parameters, and take them off again."""
        handles: list[Any] = []
        for module in self.modules:
            handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            handles.append(module.register_forward_hook(self._after))
        for name, parameter in parameters.items() if self.gradients else ():
            handles.append(_hooked(parameter, self._of_parameter(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(module, self._calls[-1] if self._calls else None, finite((args, kwargs)))
        self._calls.append(call)
        if self.gradients:  # each module gets views of its own: their gradients are what it passes back
            args = tuple(self._view(call, x) for x in args)
            kwargs = {name: self._view(call, x) for name, x in kwargs.items()}
        return args, kwargs

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = self._calls.pop()
        if finite(output):
            if self._first is not None and call in self._first.around():
                self._first = None  # masked scores, for example, that a softmax takes
        elif self._first is None and call.clean:
            self._first = call
        for x in tensors(output) if self.gradients else ():
            if x.requires_grad:
                _hooked(x, lambda gradient: self._of_output(call, gradient))

    def _view(self, call: Call, x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()):
            return x
        view = x.view_as(x)
        _hooked(view, lambda gradient: self._of_input(call, gradient))
        return view

    def _of_output(self, call: Call, gradient: Tensor) -> None:
        """Note the gradient of an output; where it is the first that is not finite, what surrounds the module made it."""
        call.gradient = finite(gradient)
        if call.gradient or self.in_backward:
            return
        self.backward = next((outer.module for outer in call.around() if outer.gradient), None)
        self.from_loss = self.backward is None

    def _of_input(self, call: Call, gradient: Tensor) -> None:
        """Note what a module passes back; a module that returns its input itself has no gradient of an output before it."""
        if call.gradient and not finite(gradient) and not self.in_backward:
            self.backward = call.module

    def _of_parameter(self, name: str) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:
            if not finite(gradient) and not self.in_backward:
                self.parameter = name

        return note


def _hooked(tensor: Tensor, note: Callable[[Tensor], None]) -> Any:
    return tensor.register_hook(note)  # type: ignore[no-untyped-call]
