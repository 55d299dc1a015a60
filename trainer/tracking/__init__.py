"""The experiment tracker as a cycle sees it.

Imports no other room.
"""
