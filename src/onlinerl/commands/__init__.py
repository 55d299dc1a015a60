"""The commands of operators that work on several folders.

Imports all folders, lazily where they are heavy.
"""
