"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`.

Imports `http`, `gateway`, `wire` and what is below them.
"""
