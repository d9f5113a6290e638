"""Segue inside other training frameworks: one callback each."""
