"""Delta tables in a folder or an object store: append, delete, files, log, lease, audit.

Imports only the base of the store.
"""
