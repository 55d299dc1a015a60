"""The keyed hash that replaces user ids, used by the gateway and by an erasure."""

import hashlib
import hmac


class UserHasher:
    """Hashes user ids with a key: equal users have equal hashes, which do not reveal the user.

    Args:
        key: The secret key; without one, no user is logged.
    """

    def __init__(self, key: str | None) -> None:
        self._key = None if key is None else key.encode()

    def hash(self, user: str | None, *, tenant: str) -> str | None:
        """The hash that is logged in place of `user`; None without a key or a user."""
        if user is None or self._key is None:
            return None
        message = f"{tenant}\0{user}".encode()
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()[:32]
