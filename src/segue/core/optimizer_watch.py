"""The user's optimizers, seen from outside: one that misses the students, and a step that is forgotten."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from segue.errors import HandoverError

PATIENCE = 8  # optimizer steps without a handover.step() before we say that it is missing


class OptimizerWatch:
    """Remember which optimizers stepped since the handover moved."""

    def __init__(self, model: nn.Module, students: list[nn.Module]) -> None:
        self.model = model
        self.students = students
        self.forget(0)

    def forget(self, step: int) -> None:
        """Start anew: the handover has moved to a step."""
        self.step = step
        self.with_students: dict[int, int] = {}  # how often each
        self.without_students = False  # one that holds other parameters of this model

    def listen(self) -> RemovableHandle:
        """Hear of every optimizer step in the process, without staying alive for it."""
        reference = weakref.ref(self)

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            alive = reference()
            if alive is not None:
                alive.stepped(optimizer)

        return register_optimizer_step_post_hook(stepped)

    def stepped(self, optimizer: Optimizer) -> None:
        """Notice what an optimizer holds, and that `handover.step()` is forgotten."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = [p for student in self.students for p in student.parameters()]
        trained = trained or list(self.model.parameters())  # students without parameters: the model around them adapts
        if not any(id(p) in held for p in trained):
            self.without_students |= any(id(p) in held for p in self.model.parameters())
            return
        times = self.with_students[id(optimizer)] = self.with_students.get(id(optimizer), 0) + 1
        if times > PATIENCE:
            raise HandoverError(
                f"the optimizer has stepped {times} times since the handover moved.",
                f"Alpha stands still: handover.step() was last called at step {self.step}.",
                "call handover.step() after every optimizer.step().",
            )

    def refuse_foreign(self) -> None:
        """Refuse an optimizer that trains the model without its students."""
        if self.without_students and not self.with_students:
            raise HandoverError(
                "step() was called after an optimizer step.",
                "That optimizer holds parameters of this model but none of its students: it was built before replace_.",
                "build it afterwards: torch.optim.AdamW(handover.parameters(), ...).",
            )
