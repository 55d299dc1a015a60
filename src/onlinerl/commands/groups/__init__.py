"""The command line by group: each module adds the parsers and handlers of one group of commands.

A handler imports what it calls, so that `onlinerl --help` imports nothing heavy.
"""
