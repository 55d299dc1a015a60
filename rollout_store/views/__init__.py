"""The DuckDB views, which are the public way to read.

Imports `tables`.
"""
