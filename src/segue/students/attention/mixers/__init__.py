"""Attention operators, one file each: the mixer (the formula) and the operator (its settings), named in `__all__`.

`segue.students` exports whatever a file in this folder names in its `__all__`.
"""
