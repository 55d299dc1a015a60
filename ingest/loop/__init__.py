"""The main loop: reads the topics, commits batches, and waits out outages.

Imports `committing` and what is below it, `rollout_store` and `process`.
"""
