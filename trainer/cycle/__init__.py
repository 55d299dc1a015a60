"""One cycle, which can be resumed at every point: window, update, candidate.

Imports every room but `schedule`, and `onlinerl.registry`.
"""
