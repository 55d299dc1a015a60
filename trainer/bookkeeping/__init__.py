"""The SQLite ledger of cycles and of the rows that were learned from.

Imports `rollouts`.
"""
