"""The controller that promotes and rolls back, and its record.

Imports every other room of deploy.
"""
