"""What every process needs: logs, health, supervision of children, files.

Imports only `errors`.
"""
