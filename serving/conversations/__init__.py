"""The exact tokens of earlier turns, so that the next turn extends them.

Imports `interaction` and `encoding`.
"""
