"""Attention students: what a module is made of, who calls it how, and what mixes its tokens."""
