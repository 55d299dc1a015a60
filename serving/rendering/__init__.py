"""Turns messages into the token ids of a prompt, by the model's template or its family's rules.

Imports `parsing`, `tokens`, `interaction` and `encoding`.
"""
