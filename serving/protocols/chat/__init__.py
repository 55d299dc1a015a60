"""OpenAI's `/v1/chat/completions`.

Imports `wire` and what is below it.
"""
