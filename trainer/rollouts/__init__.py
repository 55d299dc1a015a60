"""Which rows a cycle learns from, and the training sequences that they become.

Imports only `rollout_store` and the configuration.
"""
