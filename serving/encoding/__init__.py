"""JSON and server-sent events, read and written in one way.

Imports nothing of ours.
"""
