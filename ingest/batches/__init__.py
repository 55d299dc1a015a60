"""Turns events into Arrow rows and dead letters, and drops repeats.

Imports `decoding` and `event_log`, and `rollout_store`.
"""
