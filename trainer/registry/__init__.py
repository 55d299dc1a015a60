"""The model registry as a cycle sees it.

Imports only `onlinerl.registry`.
"""
