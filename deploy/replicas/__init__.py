"""The engines as the controller sees them: stage, commit, prove.

Imports only the base of deploy.
"""
