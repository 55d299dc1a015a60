"""The values that every room of serving speaks: request, pieces of an answer, caller, exchange.

Imports only `rollout_store`'s schema and the configuration.
"""
