"""The ASGI side of every route: bounds, idempotency, listening, draining.

Imports `gateway`, `wire` and what is below them.
"""
