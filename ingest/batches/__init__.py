"""Events to Arrow rows and dead letters; duplicates are skipped.

Imports `decoding` and `event_log`.
"""
