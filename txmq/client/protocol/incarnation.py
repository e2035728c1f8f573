"""Which incarnation of a producer instance a client is: registered by its first
connection, named by all others.
"""

from __future__ import annotations

from threading import Lock


class Incarnation:
    """A client's place among the processes that have been this instance; `number` is 0
    until it is registered.

    Only one connection may register it, or the client would fence itself: the others
    wait for that, by trying again.
    """

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.number = 0
        self._claim = Lock()

    def claim(self) -> bool:
        """Takes the registration over, if nobody has; it is to be released."""
        return self._claim.acquire(blocking=False)

    def release(self) -> None:
        """The connection that had the registration is done with it, one way or the
        other.
        """
        self._claim.release()
