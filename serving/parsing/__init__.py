"""Sampled token ids to text, reasoning and tool calls.

Imports `tokens`, `interaction` and `encoding`.
"""
