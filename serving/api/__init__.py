"""The ASGI application with all routes, and the OpenAPI document that describes them.

Imports `protocols`, `feedback`, `http` and what is below them.
"""
