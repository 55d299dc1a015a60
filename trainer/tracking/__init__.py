"""The experiment tracker as a cycle sees it.

Imports only `onlinerl.registry`.
"""
