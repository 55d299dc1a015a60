"""The groups of commands: each module adds the parsers of its group and one handler per command.

May import `commands.arguments`; a handler imports the part that it runs when it is called.
"""
