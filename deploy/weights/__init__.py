"""The format of published weights: anchors, deltas and their manifests; `delta` explains it.

Imports no other room of deploy; serving imports only this one.
"""
