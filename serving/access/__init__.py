"""API keys and limits: which callers are let in, and how much they may ask for.

Imports `interaction`, `encoding` and `observability`.
"""
