"""The environment variables that hold secrets. All other configuration is in files."""

USER_HASH_KEY = "ONLINERL_USER_HASH_KEY"
"""The key under which user ids are hashed."""

ENGINE_SECRET = "ONLINERL_ENGINE_SECRET"
"""What the guard of an engine asks for."""

MIN_SECRET = 16
"""Characters of the shortest engine secret that is accepted."""

API_KEYS = "ONLINERL_API_KEYS"
"""More API keys: a JSON list of `{"name": …, "sha256": …, …}`."""
