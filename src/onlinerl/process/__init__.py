"""Tools that every process uses: logs, health, files, fault streaks, supervision of children.

May import `errors` only.
"""
