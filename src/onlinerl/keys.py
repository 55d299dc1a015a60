"""API keys: made here, kept by their owner, known to the gateway only by their SHA-256."""

import hashlib
import secrets
import sys

PREFIX = "orl-"


def new_key() -> str:
    """A fresh key with 256 bits of randomness."""
    return PREFIX + secrets.token_urlsafe(32)


def key_hash(key: str) -> str:
    """What the configuration holds: lower-case hexadecimal SHA-256.

    A plain hash is enough because the key is random and long; it cannot be guessed offline.
    """
    return hashlib.sha256(key.encode()).hexdigest()


def run_keys_new(*, name: str, tenant: str, consent: str) -> int:
    """Print the key to standard error once, and the TOML for the gateway to standard output."""
    key = new_key()
    sys.stderr.write(f"key (shown once, give it to the client): {key}\n")
    sys.stdout.write(
        "[[gateway.api_keys]]\n"
        f'name = "{name}"\nsha256 = "{key_hash(key)}"\ntenant = "{tenant}"\nconsent = "{consent}"\n'
    )
    return 0
