"""`onlinerl schedule`: when a cycle is due, and the child process that runs it.

Imports `assembly`, `cycle`, `bookkeeping` and the configuration.
"""
