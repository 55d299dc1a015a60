"""Forgets one person in every table, and proves it.

Imports `snapshots` and `tables`.
"""
