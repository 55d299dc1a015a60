"""Names of the environment variables that hold secrets; all other configuration is in files."""

USER_HASH_KEY = "ONLINERL_USER_HASH_KEY"
"""The key under which user ids are hashed."""

ENGINE_SECRET = "ONLINERL_ENGINE_SECRET"
"""The bearer token that the guard of an engine requires."""

MIN_SECRET = 16
"""Fewest characters of an engine secret."""

API_KEYS = "ONLINERL_API_KEYS"
"""API keys beside those in files: a JSON list of `{"name": …, "sha256": …, …}`."""
