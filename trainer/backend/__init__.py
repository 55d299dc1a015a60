"""What computes gradients: the protocol, the torch backend, and an in-memory twin.

Imports `losses`, `rollouts` and the configuration.
"""
