"""Experiments: a run is a Python function that returns a config; one folder per experiment."""
