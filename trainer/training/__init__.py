"""Optimizer steps over a window, and when to stop.

Imports `backend`, `losses` and `rollouts`.
"""
