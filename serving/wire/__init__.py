"""What protocols implement and share: the seam, checks of a body, tools, the error envelope.

Imports `interaction` and `encoding`.
"""
