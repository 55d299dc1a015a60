"""What answers callers: the gateway, the spool of what it logs, and the engine behind it."""
