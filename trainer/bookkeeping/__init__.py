"""The SQLite ledger of cycles and trained rows, and the lease.

Imports `rollouts`, the configuration and `rollout_store`.
"""
