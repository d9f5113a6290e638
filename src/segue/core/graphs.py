"""What torch's compiler cannot do, said in our words while it traces."""

from __future__ import annotations

from typing import Any

import torch

from segue.errors import HandoverError, three_lines


class GraphError(HandoverError, AssertionError):
    """A handover that cannot become one graph. As an AssertionError it leaves torch's tracer unwrapped."""


def refuse_recording_under_checkpointing() -> bool:
    """Refuse, at trace time, to keep outputs inside a checkpointed region that must be part of one graph."""
    if torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint or not _in_checkpointed_region_of_one_graph():
        return True
    text = three_lines(
        "guidance was to record the outputs at a site in a compiled graph.",
        "The site lies in a region under activation checkpointing, from which torch.compile(fullgraph=True) lets nothing out.",
        "set torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True (the gradients are the same), "
        "or compile without fullgraph.",
    )
    raise GraphError(text)  # one text, because torch appends to the first argument where it was raised


# What torch.compiler.assume_constant_result sets: run at trace time. The decorator itself would load the compiler here.
refuse_recording_under_checkpointing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _in_checkpointed_region_of_one_graph() -> bool:
    """Ask torch's tracer; it has no public answer, so where its insides differ torch's own error stands."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        translator: Any = InstructionTranslator.current_tx()
        one_graph = translator.one_graph or translator.error_on_graph_break
        tracer = translator.output.current_tracer
        while tracer is not None and "checkpoint" not in str(tracer.source_target).lower():
            tracer = tracer.parent
    except (ImportError, AttributeError):
        return False
    return bool(one_graph) and tracer is not None
