"""Figures 1 and 2 and Table 1 of the paper, built from committed results."""
