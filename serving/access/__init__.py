"""API keys, consent and rate limits: who may ask, and how much.

Imports `interaction`, `encoding` and `observability`.
"""
