"""Attention students: specs and interfaces of attention modules, the student around a mixer, and its cache."""
