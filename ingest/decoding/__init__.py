"""The bytes of a record to an event, or to the reason why they are none.

Imports only `rollout_store`.
"""
