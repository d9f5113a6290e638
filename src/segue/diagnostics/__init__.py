"""Diagnostics: the paper's claims and a plan's cost, measured on the user's own model."""

from segue.diagnostics.costs import Cost, cost

__all__ = ["Cost", "cost"]
