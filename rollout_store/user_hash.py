"""The keyed hash under which users are logged, made when they are served and when erased."""

import hashlib
import hmac


class UserHasher:
    """Keyed hash of user ids: equal users stay equal, nobody reads who they are."""

    def __init__(self, key: str | None) -> None:
        self._key = None if key is None else key.encode()

    def hash(self, user: str | None, *, tenant: str) -> str | None:
        """What is logged in place of `user`; nothing when there is no key."""
        if user is None or self._key is None:
            return None
        message = f"{tenant}\0{user}".encode()
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()[:32]
