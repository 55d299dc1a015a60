"""OpenAI's `/v1/responses`, and the responses that it stores.

Imports `http`, `access`, `wire` and what is below them.
"""
