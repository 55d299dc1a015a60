"""`/v1/feedback`: signals of users become events.

Imports `http`, `access`, `wire` and what is below them.
"""
