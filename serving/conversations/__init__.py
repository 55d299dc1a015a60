"""Remembers the exact tokens of earlier turns, so that next turns extend them.

Imports `interaction` and `encoding`.
"""
