"""`onlinerl maintain`: retention, compaction and vacuum.

Imports `erasure`, `snapshots` and `tables`.
"""
