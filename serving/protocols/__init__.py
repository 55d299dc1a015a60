"""One package for each protocol that clients speak; none imports another.

A protocol imports `http`, `gateway`, `wire` and what is below them.
"""
