"""Operators in place of attention: the runs, the measured speed and the report that compares them."""
