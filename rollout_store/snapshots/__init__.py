"""Named versions of the tables that stay readable.

Imports `tables`.
"""
