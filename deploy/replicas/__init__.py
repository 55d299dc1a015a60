"""The engines as the controller sees them: stage, commit and verify a version.

Imports no other room of deploy.
"""
