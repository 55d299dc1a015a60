"""Which event an answer is logged as, and whether a learner may use it.

Imports `interaction` and `observability`.
"""
