"""Writes rows together with the offsets that they came from, in one commit of a table.

Imports `batches`, `event_log` and the base of ingest, and `rollout_store`.
"""
