"""Planning: which sites, which operator, in what order and how slowly."""

from segue.planning.heads import ChosenHeads, choose_heads
from segue.planning.planned import Choice, Planned
from segue.planning.planner import plan_replacement
from segue.planning.replanning import Replanned, replan
from segue.planning.solving import Frontier, Quality, Saving

__all__ = [
    "Choice",
    "ChosenHeads",
    "Frontier",
    "Planned",
    "Quality",
    "Replanned",
    "Saving",
    "choose_heads",
    "plan_replacement",
    "replan",
]


def __dir__() -> list[str]:
    return sorted(__all__)
