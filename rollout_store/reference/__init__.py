"""Generates docs/tables.md and the DDL; only tests and `make docs` import it.

Imports `views` and `tables`.
"""
