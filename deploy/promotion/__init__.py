"""The controller that promotes and rolls back, the records of it, and the commands for a person.

Imports every other room of deploy.
"""
