"""Removes personal data from rows before they are stored.

Imports only the base of ingest and `rollout_store`.
"""
