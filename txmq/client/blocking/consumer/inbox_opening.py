"""The opening of an inbox's partitions by several threads."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from txmq.client.protocol.awaited import inbox_opening
from txmq.faces import run
from txmq.tx.postgres.drivers import blocking_driver
from txmq.tx.postgres.inbox import Position

if TYPE_CHECKING:
    from txmq.client.blocking.core import BlockingCore
    from txmq.tx.postgres.driver import BlockingConnection


class InboxMember(inbox_opening.InboxMember, Protocol):
    """A member of a consumer, as its inbox uses it in any thread."""

    @property
    def core(self) -> BlockingCore: ...


class InboxOpenings(inbox_opening.InboxOpenings):
    """The open partitions of a member's inbox, for all its threads."""

    def __init__(self, member: InboxMember) -> None:
        async def call(name: str, args: dict[str, Any]) -> dict[str, Any]:
            return member.core.call(name, args, repeat=True)

        super().__init__(member, call)
        self._lock = Lock()

    def open(self, connection: BlockingConnection, position: Position, topic: str) -> int:
        """Open a position; see `open_position`."""
        with self._lock:
            return run(self.open_position(blocking_driver(connection), position, topic))
