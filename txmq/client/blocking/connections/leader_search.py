"""The search for the node that leads, while a silent one keeps its connections open."""

from __future__ import annotations

import time
from collections.abc import Callable

from txmq.client.blocking.connections.connection import Connection
from txmq.client.protocol.conversation import Conversation, superseded
from txmq.errors import TxmqError

PAUSE_S = 0.5  # between two searches


class LeaderSearch:
    """Opens the connections of one thread. `connect` opens one before a deadline."""

    def __init__(self, connect: Callable[[float], Connection]) -> None:
        self._connect = connect
        self._found: Connection | None = None
        self._begins_at = 0.0

    def connection(self, deadline: float) -> Connection:
        """Return the connection that was found, or another one. Raises as `connect`."""
        found, self._found = self._found, None
        return found or self._connect(deadline)

    def close(self) -> None:
        """Close the connection that was found, if nobody took it."""
        if self._found is not None:
            self._found.close()

    def ask(self, silent: Conversation, within: float) -> None:
        """Ask the other nodes who leads. Raises ConnectionLost where one proves that it
        does `within` so many seconds; otherwise the silent one may be busy.
        """
        began = time.monotonic()
        if began < self._begins_at or not silent.has_other_nodes:
            return
        silent.note_silence()
        try:
            found = self._connect(began + within)
        except TxmqError:
            return
        finally:
            self._begins_at = time.monotonic() + PAUSE_S
        if silent.is_superseded:
            self._found = found
            raise superseded()
        found.close()
