"""Text to token ids and back, with the control tokens of a template kept apart.

Imports `interaction` and `encoding`.
"""
