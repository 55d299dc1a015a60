"""Optimizer steps over a window, and when to stop.

Imports `backend`, `losses`, `rollouts` and the configuration.
"""
