"""`onlinerl engine`: vLLM as a child process, and the guard before it.

A process of its own: imports no room of the gateway.
"""
