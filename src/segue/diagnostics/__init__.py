"""Diagnostics: the paper's claims and a plan's cost, measured on the user's own model."""

from segue.diagnostics.costs import Cost, cost
from segue.diagnostics.curvature import CurvatureBias, curvature_bias
from segue.diagnostics.gate_distribution import GateDistribution, distribution_of
from segue.diagnostics.gradient_variance import GateGradientVariance, gate_gradient_variance
from segue.diagnostics.loss_path import LossPath, loss_path
from segue.diagnostics.recorder import Recorder

__all__ = [
    "Cost",
    "CurvatureBias",
    "GateDistribution",
    "GateGradientVariance",
    "LossPath",
    "Recorder",
    "cost",
    "curvature_bias",
    "distribution_of",
    "gate_gradient_variance",
    "loss_path",
]


def __dir__() -> list[str]:
    return sorted(__all__)
