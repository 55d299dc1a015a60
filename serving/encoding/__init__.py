"""JSON and server-sent events: the one place where they are read and written.

Imports nothing of ours.
"""
