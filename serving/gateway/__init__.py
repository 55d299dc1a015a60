"""Answers one request, whatever protocol it came in.

Imports `capture`, `conversations`, `rendering`, `routing`, `access`, and what is below them.
"""
