"""Takes personal data out of text and tokens before they are stored.

Imports only the base of ingest and `rollout_store`.
"""
