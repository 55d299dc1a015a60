"""Decodes the bytes of a record into an event, or says why it is none.

Imports only `rollout_store`.
"""
