"""The policy losses and the filters of tokens, as pure functions of tensors.

Imports only the configuration.
"""
