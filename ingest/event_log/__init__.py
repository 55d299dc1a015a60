"""The topics as ingest reads them: Kafka, and a twin in memory.

Imports only the base of ingest and `rollout_store`.
"""
