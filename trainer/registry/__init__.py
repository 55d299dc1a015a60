"""The model registry as a cycle sees it, and folders of checkpoints.

Imports no other room.
"""
