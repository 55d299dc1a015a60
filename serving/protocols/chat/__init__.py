"""OpenAI's `/v1/chat/completions` and `/v1/completions`.

Imports `wire` and what is below it.
"""
