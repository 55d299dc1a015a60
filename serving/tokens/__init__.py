"""Text to token ids and back; control tokens that callers spell stay plain text.

Imports `interaction` and `encoding`.
"""
