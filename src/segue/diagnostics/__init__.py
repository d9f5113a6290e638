"""Diagnostics: the paper's claims and a plan's cost, measured on the user's own model."""
