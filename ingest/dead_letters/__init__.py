"""`onlinerl dead-letters`: lists the records that broke the event contract, and replays them.

Imports only `rollout_store`.
"""
