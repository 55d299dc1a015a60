"""`onlinerl dead-letters`: list the records that were refused, and replay them.

Imports only `rollout_store`.
"""
