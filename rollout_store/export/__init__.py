"""`onlinerl export`: rows as files for other programs.

Imports `query`, `views`, `snapshots` and `tables`.
"""
