"""Follows the topics, gathers, commits, and outlives outages.

Imports `committing` and what is below it.
"""
