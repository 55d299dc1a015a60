"""Versions, aliases, requests and checkpoints as the controller sees them.

Imports `trainer.registry`.
"""
