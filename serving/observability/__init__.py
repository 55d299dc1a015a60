"""Metrics and traces of the gateway; neither ever holds what users wrote.

Imports `interaction`.
"""
