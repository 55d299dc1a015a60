"""Which arm and which replica answer a request, and who takes over when one fails.

Imports `interaction` and `observability`.
"""
