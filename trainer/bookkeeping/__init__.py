"""The SQLite ledger of cycles, of the rows that were learned from, and of the lease.

Imports `rollouts`.
"""
