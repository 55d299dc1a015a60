"""The schema and the tables of everything that is logged, and the views to read it.

Imports no sibling folder.
"""
