"""Identity of a client: its process, and the producer instance that it may be."""

from __future__ import annotations

import os
from functools import cache
from threading import Lock
from uuid import uuid4


class ProducerInstance:
    """A named producer instance and this client's epoch of it.

    The first connection registers the instance and gets the epoch; all later ones send
    it. `epoch` is 0 until then. Only one connection may register, or the client would
    fence itself. The other connections try again later.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 0
        self._registration = Lock()

    def claim(self) -> bool:
        """Claim the registration for a connection, which has to release it later.

        Return False where another connection has claimed it.
        """
        return self._registration.acquire(blocking=False)

    def release(self) -> None:
        """Release the registration, whether it succeeded or not."""
        self._registration.release()


@cache
def process_id() -> str:
    """Return 32 hex digits that are new in each process.

    A broker asks this process first about the transactions that it stored.
    """
    return uuid4().hex


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=process_id.cache_clear)
