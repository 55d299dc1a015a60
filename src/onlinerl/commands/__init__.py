"""The command line by group, and the commands that work on several folders.

May import everything but `cli`; the parsers import it lazily.
"""
