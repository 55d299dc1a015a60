"""The topics as ingest reads them: positions, records, and partitions that change hands.

Imports only the base of ingest and `rollout_store`.
"""
