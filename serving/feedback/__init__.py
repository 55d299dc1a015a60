"""`/v1/feedback`: records signals about answers and sessions as events.

Imports `http`, `access`, `wire` and what is below them.
"""
