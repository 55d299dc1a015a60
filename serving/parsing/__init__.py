"""Turns sampled token ids into text, reasoning and tool calls.

Imports `tokens`, `interaction` and `encoding`.
"""
