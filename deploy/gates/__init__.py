"""Measures a candidate and judges it.

Imports `registry` and `replicas`.
"""
