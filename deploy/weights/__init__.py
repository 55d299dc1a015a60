"""The format of published weights: anchors, deltas, manifests; serving imports only this room.

Imports no other room.
"""
