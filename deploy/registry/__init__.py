"""The registry as the deploy controller sees it: requests of operators, base model, trained rows.

Imports only `onlinerl.registry`.
"""
