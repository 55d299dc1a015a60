"""Erases one person from every table, and proves it.

Imports `snapshots` and `tables`.
"""
