"""Messages to the token ids of a prompt, by a model's own template or its family's renderer.

Imports `parsing`, `tokens`, `interaction` and `encoding`.
"""
