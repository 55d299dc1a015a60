"""Measures a candidate and judges whether it may serve.

Imports `registry` and `replicas`.
"""
