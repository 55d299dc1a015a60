"""All routes put together, and the OpenAPI document of them.

Imports `protocols`, `feedback`, `http` and what is below them.
"""
