"""OpenAI's `/v1/completions`.

Imports `wire` and what is below it.
"""
