"""`onlinerl query`: SQL on tables and views.

Imports `views`, `snapshots` and `tables`.
"""
