"""An engine over HTTP, and its twin in memory for unit tests.

Imports `interaction` and `encoding`.
"""
